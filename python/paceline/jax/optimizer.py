"""distributed_optimizer: an optax optimizer that reduces gradients over all ranks before it steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp

from paceline.common import abi
from paceline.common import compression as codecs
from paceline.common.arguments import asked_of, check_passes
from paceline.common.codec_tuning import resolved
from paceline.common.compression import CompressionArgument
from paceline.common.operation import How, Options
from paceline.common.operators import Adasum, Average, operator_of
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.common.significance import Significance
from paceline.common.sync import Model
from paceline.jax._collective import collective
from paceline.jax._holding import Holding
from paceline.jax._ops import arrays_of, reduction, takes_part
from paceline.jax._state import DistributedState, Tree, byte_sizes, flags_of, is_traced, offer, paths, with_gate
from paceline.jax.compression import Compression

try:
    import optax
except ModuleNotFoundError:
    optax = None

__all__ = ["DistributedState", "distributed_optimizer"]


def distributed_optimizer(
    optimizer: Any,
    compression: CompressionArgument = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    sync: Model | str | None = None,
    gate: Significance | None = None,
    pull_gate: Significance | None = None,
    name: str = "",
) -> Any:
    """Wraps an optax optimizer so that gradients are reduced over all ranks before it steps.

    `init` and `update` are used as the optimizer's, within jax.jit or outside. All gradients travel as one group, the
    first with the highest priority. Every rank makes the same optimizers in the same order.

    compression: hvd.Compression.fp16 or a compressor of your own, or a codec of the engine, such as
        hvd.Compression.topk(0.01), "int8" or hvd.Compression.auto(), which measures in `init`. Default:
        PACELINE_COMPRESSION, else none.
    backward_passes_per_step: how many calls of `update` add gradients up before one reduces them and steps. The others
        return updates of zero.
    op: Average, Sum, Min, Max or Product.
    gradient_predivide_factor f: with Average, gradients are multiplied by 1/f before the sum and by f/size after it.
    process_set: the ranks that share their gradients; the others step with their own.
    sync: the synchronisation model, such as paceline.SSP(3) or "ssp:3". Default: PACELINE_SYNC, else BSP. Under a model
        that lets ranks run ahead, the servers hold the parameters and each rank steps with its own gradients: the
        servers add the change, divided by the number of ranks for Average, and the rank continues with the sum of all
        ranks' changes. `update` then needs params. At the end `agree` gives all ranks the same parameters. Models that
        decide between iterations (adaptive, ElasticBSP, cached SSP, and those that use the significance) need `init`
        and `update` outside of jax.jit; the gradients may be jitted.
    gate: paceline.Significance(...): a rank sends only significant changes; the others add up in the state until they
        are. `update` then needs params.
    pull_gate: the same for pulls, under a model that lets ranks run ahead.
    name: stands before the names of the parameters, where several optimizers have parameters of the same names.

    Returns an optax.GradientTransformationExtraArgs with one more attribute: agree(params), which returns the
    parameters that all ranks have in common. Raises ValueError for wrong arguments, ImportError without optax.
    """
    if optax is None:
        raise ImportError("distributed_optimizer wraps optax's optimizers; pip install optax")
    if not hasattr(optimizer, "update"):
        raise ValueError(f"distributed_optimizer wraps an optimizer of optax, not {type(optimizer).__name__}")
    check_passes(backward_passes_per_step)
    if operator_of(op, None) == Adasum:
        raise ValueError("op=hvd.Adasum combines the ranks' steps: reduce the updates with hvd.allreduce instead")
    factor = gradient_predivide_factor
    model, compressor, codec = asked_of(compression, process_set, sync, gate, pull_gate, op=op, predivide=factor)
    optimizer = optax.with_extra_args_support(optimizer)
    kind: _Reducing | Holding
    if model.ahead:
        kind = Holding(optimizer, name, op, process_set, model, codec, gate, pull_gate)
    else:
        how = How(op, 1.0 / factor, factor, process_set, Options(sync=model.declared))
        kind = _Reducing(optimizer, name, how, compressor, codec, gate)
    return _transformation(kind, backward_passes_per_step)


class _Reducing:
    """Ranks wait for each other: gradients are reduced before each step."""

    def __init__(
        self,
        optimizer: Any,
        name: str,
        how: How,
        compressor: Any,
        codec: codecs.Codec | None,
        gate: Significance | None,
    ) -> None:
        self._optimizer, self._name, self._how = optimizer, name, how
        self._compressor, self._codec, self._gate = compressor, codec, gate
        if not isinstance(codec, codecs.Auto):
            self._code([])

    def _code(self, sizes: Sequence[int]) -> None:
        text = resolved(self._codec, sizes, self._how.process_set)
        self._how = self._how._replace(options=dataclasses.replace(self._how.options, codec=text))

    def init(self, params: Tree) -> DistributedState:
        self._code(byte_sizes(params))
        state = DistributedState(self._optimizer.init(params))
        return state if self._gate is None else with_gate(state, params)

    def step(self, grads: Tree, state: DistributedState, params: Tree, extra: Any) -> tuple[Tree, DistributedState]:
        if takes_part(self._how.process_set):  # the other ranks step alone
            empty = None
            if self._gate is not None:
                grads, empty, state = offer(self._gate, grads, state, params)
            grads = self._reduce(grads, empty)
        updates, inner = self._optimizer.update(grads, state.inner, params, **extra)
        return updates, state._replace(inner=inner)

    def _reduce(self, grads: Tree, empty: jax.Array | None) -> Tree:
        arrays, structure = arrays_of(grads, abi.ALLREDUCE, "distributed_optimizer")
        compressed = [self._compressor.compress(a) for a in arrays]
        call = reduction(
            self._how,
            [f"allreduce.{self._name}{path}" for path in paths(grads)],
            priorities=tuple(-i for i in range(len(arrays))),
            gated=empty is not None,
        )
        results = collective(call, [*flags_of(empty), *(a for a, _ in compressed)])
        restored = [self._compressor.decompress(r, ctx) for r, (_, ctx) in zip(results, compressed, strict=True)]
        return jax.tree_util.tree_unflatten(structure, restored)

    def agree(self, params: Tree) -> Tree:
        """The parameters themselves: ranks agree after every step."""
        return params


def _transformation(kind: _Reducing | Holding, passes: int) -> Any:
    """The optax transformation, with `passes` calls of update for a step."""

    def init(params: Tree) -> DistributedState:
        state = kind.init(params)
        if passes == 1:
            return state
        zeros = jax.tree_util.tree_map(jnp.zeros_like, params)
        return state._replace(passes=jnp.zeros((), jnp.int32), accumulated=zeros)

    def update(grads: Tree, state: DistributedState, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        if passes == 1:
            return kind.step(grads, state, params, extra)
        total = jax.tree_util.tree_map(jnp.add, state.accumulated, grads)
        done = state.passes + 1

        def step(_: None) -> tuple[Tree, DistributedState]:
            updates, after = kind.step(total, state, params, extra)
            zeros = jax.tree_util.tree_map(jnp.zeros_like, total)
            return updates, after._replace(passes=jnp.zeros_like(done), accumulated=zeros)

        def keep(like: Tree) -> tuple[Tree, DistributedState]:
            zeros = jax.tree_util.tree_map(lambda u: jnp.zeros(u.shape, u.dtype), like)
            return zeros, state._replace(passes=done, accumulated=total)

        if not is_traced((grads, done)):
            return step(None) if done == passes else keep(total)
        updates, _ = jax.eval_shape(step, None)  # the optimizer may give them other types than the gradients'
        return jax.lax.cond(_of_all_mapped(done) == passes, step, lambda _: keep(updates), None)

    return _distributed_transformation()(init, update, kind.agree)


@jax.custom_batching.custom_vmap
def _of_all_mapped(passes: jax.Array) -> jax.Array:
    """The number of passes, which decides for all that vmap maps together whether they exchange."""
    return passes


@_of_all_mapped.def_vmap
def _of_each(*_: Any) -> Any:
    """Each has a number of its own: vmap would exchange in every pass, and choose between the results afterwards."""
    raise NotImplementedError(
        "vmap of an optimizer with backward_passes_per_step: all that is mapped together has one number of passes, "
        "so that in_axes and out_axes are None for the state's passes"
    )


def _distributed_transformation() -> Callable[..., Any]:
    class DistributedTransformation(optax.GradientTransformationExtraArgs):
        """An optax transformation that can also agree."""

        agree: Callable[[Tree], Tree]

    def make(init: Any, update: Any, agree: Callable[[Tree], Tree]) -> Any:
        made = DistributedTransformation(init, update)
        made.agree = agree
        return made

    return make
