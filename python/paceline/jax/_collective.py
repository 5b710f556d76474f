"""The JAX primitive behind every operation: a group of tensors that the engine exchanges.

It has an ordered effect. JAX threads a token through it, within a program, through loops, branches and inner programs,
and from program to program, so that every rank starts its operations in the order of the Python program. That is why
operations match without names, and why XLA can neither drop, merge nor reorder them.

Outside of a program it runs on the host (`_host.py`). In a program for the CPU it is a custom call, whose handler
returns a future (bindings/jax). On other devices, and where XLA has no futures, it is a Python callback.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import effects, util
from jax._src.dispatch import runtime_tokens
from jax._src.interpreters.mlir import custom_call, token_type
from jax.interpreters import ad, batching
from jax.interpreters.mlir import TokenSet, dtype_to_ir_type, emit_python_callback, ir, register_lowering

from paceline.common import abi
from paceline.common.engine import engine
from paceline.common.operation import DEFAULTS, Options, c_text
from paceline.common.operators import Adasum
from paceline.common.process_sets import ProcessSet
from paceline.jax import _glue, _host

try:
    from jax.extend.core import Primitive
except ImportError:  # JAX 0.4.26 and older
    from jax.core import Primitive

# Used when programs end: a version without them is an error at import (__init__.py).
runtime_tokens.current_tokens, runtime_tokens.output_runtime_tokens  # noqa: B018

Shape = tuple[int, ...]

# Kinds whose first dimension is shared out or joined.
BY_ROWS = frozenset({abi.ALLGATHER, abi.ALLTOALL, abi.REDUCESCATTER})


@dataclasses.dataclass(frozen=True)
class Call:
    """A group of operations, but for their tensors: what a program is compiled with."""

    kind: int
    names: tuple[str | None, ...]
    process_set: int = 0
    place: int = 0  # this rank's number in the set
    size: int = 1  # of the set
    op: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    declared_by: ProcessSet | None = None  # held values are declared by its newest rank, in place of the root
    priorities: tuple[int, ...] = ()  # none: 0 for all
    options: Options = DEFAULTS
    use: int = 0  # of held values
    significance: float = 0.0  # of held values, outside of programs
    group: str | None = None  # of held values, outside of programs
    gated: bool = False  # the first array says which tensors are zeros, that are not sent
    of_job: bool = False  # the program around it has this rank's number
    job: int = dataclasses.field(default_factory=lambda: _job)  # in which it was traced

    def unnamed(self, count: int) -> Call:
        """The same for so many other tensors, without names, and coded as the job says: for gradients."""
        return dataclasses.replace(self, names=(None,) * count, options=self.options.of_gradient())

    def priority(self, place: int) -> int:
        """The priority of a tensor of the group."""
        return self.priorities[place] if self.priorities else 0

    def result(self, shape: Shape) -> Shape:
        """The shape of a tensor's result, where all ranks have tensors of that shape."""
        if self.kind == abi.ALLGATHER:
            return (shape[0] * self.size, *shape[1:])
        if self.kind == abi.REDUCESCATTER:
            share, over = divmod(shape[0], self.size)
            return (share + (self.place < over), *shape[1:])
        return shape


class CollectiveEffect(effects.Effect):
    """The effect of an operation on the other ranks."""

    __str__ = __repr__ = lambda _: "Paceline"


_effect = CollectiveEffect()
for _kinds in ("lowerable", "ordered", "control_flow_allowed", "custom_derivatives_allowed", "remat_allowed"):
    getattr(effects, f"{_kinds}_effects").add_type(CollectiveEffect)

collective_p = Primitive("paceline")
collective_p.multiple_results = True
_job = 1  # counts shutdowns


def collective(call: Call, arrays: Sequence[Any]) -> list[Any]:
    """The results of the group, in its order."""
    return collective_p.bind(*arrays, call=call)


def settle() -> None:
    """Waits for the operations of programs that have been started.

    What went wrong there is in the results of these programs.
    """
    try:
        runtime_tokens.block_until_ready()
    except Exception:
        runtime_tokens.clear()  # of a program that failed: it would fail all that come later


@collective_p.def_impl
def _run(*arrays: Any, call: Call) -> list[Any]:
    """Outside of a program: waits for the results."""
    settle()
    results = _host.run(call, [np.asarray(a) for a in arrays])
    return [put_like(a, r) for a, r in zip(arrays[call.gated :], results, strict=True)]


def put_like(array: Any, result: Any) -> jax.Array:
    """The result as an array of JAX, where the tensor lies if that may not be elsewhere.

    Of a tensor on several devices, whose shares are those of its shape, only a result of that shape is.
    """
    stays = getattr(array, "_committed", False)  # an array of NumPy is nowhere
    fits = stays and (result.shape == array.shape or len(array.sharding.device_set) == 1)
    return jax.device_put(result, array.sharding if fits else None)


@collective_p.def_effectful_abstract_eval
def _abstract(*arrays: Any, call: Call) -> Any:
    return [a.update(shape=call.result(a.shape), weak_type=False) for a in arrays[call.gated :]], {_effect}


def _lower(ctx: Any, *operands: Any, call: Call) -> Any:
    """In a program."""
    token = ctx.tokens_in.get(_effect)
    several = isinstance(token, (tuple, list))  # of one, in JAX 0.4.26 and older
    if several:
        (token,) = token
    # Who declares is known when the program runs.
    if _glue.has_handler() and ctx.module_context.platforms == ("cpu",) and call.declared_by is None:
        _glue.set_job(_job)
        token, results = _lower_to_handler(ctx, token, operands, call)
    else:
        job = _job_of(call)

        def run(*arrays: Any) -> Any:
            if job not in (0, _job):
                raise ValueError(
                    "the program was compiled for an earlier job, whose size or process sets it has: compile it again"
                )
            return tuple(_host.run(call, [np.asarray(a) for a in arrays], compiled=True))

        results, token, _ = emit_python_callback(
            ctx,
            run,
            token,
            list(operands),
            ctx.avals_in,
            ctx.avals_out,
            has_side_effect=True,
        )
        _drop_descriptor(token)
    ctx.set_tokens_out(TokenSet({_effect: (token,) if several else token}))
    return results


def _drop_descriptor(token: Any) -> None:
    """Empties the configuration of a callback on the CPU, a number that stands in its first operand too.

    Some passes of XLA in jaxlib 0.4.31 read every instruction's configuration as JSON, and abort at a number.
    """
    call = token.owner
    if call.name == "stablehlo.get_tuple_element":
        call = call.operands[0].owner
    if call.name == "stablehlo.custom_call" and call.attributes["call_target_name"].value == "xla_python_cpu_callback":
        call.attributes["backend_config"] = ir.StringAttr.get("")


def _lower_to_handler(ctx: Any, token: Any, operands: Sequence[Any], call: Call) -> tuple[Any, Sequence[Any]]:
    row_major = [()] + [tuple(reversed(range(len(a.shape)))) for a in ctx.avals_in]
    op = custom_call(
        _glue.TARGET,
        result_types=[token_type(), *map(_ir_type, ctx.avals_out)],
        operands=[token, *operands],
        backend_config=_attributes(call),
        has_side_effect=True,
        api_version=4,
        operand_layouts=row_major,
        result_layouts=[()] + row_major[1 + call.gated :],
    )
    first, *results = op.results
    return first, results


def _ir_type(aval: Any) -> Any:
    return ir.RankedTensorType.get(aval.shape, dtype_to_ir_type(aval.dtype))


def _attributes(call: Call) -> dict[str, Any]:
    """The call for bindings/jax/collective.c, which lists the numbers."""
    options, gate = call.options, call.options.pull_gate
    texts = [None if t is None else c_text(t) for t in (*call.names, options.sync, options.codec)]
    lengths = [-1 if t is None else len(t) for t in texts]
    *names, sync, codec = lengths
    numbers = [
        _job_of(call),
        call.kind,
        call.op,
        call.process_set,
        call.root,
        options.soft_park,
        call.use,
        call.gated,
        sync,
        codec,
    ]
    for place, length in enumerate(names):
        numbers += [call.priority(place), length]
    scales = [call.prescale, call.postscale, gate.threshold if gate else 0.0, gate.decay if gate else 0.0]
    return {
        "numbers": ir.DenseI64ArrayAttr.get([int(n) for n in numbers]),
        "scales": ir.DenseF64ArrayAttr.get(scales),
        "text": ir.StringAttr.get(b"".join(t for t in texts if t)),
    }


register_lowering(collective_p, _lower)


def _batch(arrays: Sequence[Any], dims: Sequence[Any], *, call: Call) -> tuple[list[Any], list[Any]]:
    """vmap: one operation on the tensors with their mapped dimension, which no operation but Adasum looks at."""
    if call.gated or call.kind == abi.ACCUMULATE or (call.kind == abi.ALLREDUCE and call.op == Adasum):
        what = "Adasum" if call.op == Adasum else "an optimizer that exchanges changes"
        raise NotImplementedError(f"vmap of {what}: it looks at whole tensors, not at elements")
    at = int(call.kind in BY_ROWS)
    mapped = [d is not None for d in dims]
    moved = [jnp.moveaxis(a, d, at) if m else a for a, d, m in zip(arrays, dims, mapped, strict=True)]
    return collective(call, moved), [at if m else None for m in mapped]


batching.primitive_batchers[collective_p] = _batch


def _no_tangents(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("a held value has no gradient: differentiate the loss, not the optimizer")


ad.primitive_jvps[collective_p] = _no_tangents


def _job_of(call: Call) -> int:
    """The job that a program with the call is compiled for; 0 for any, where neither its size nor its sets matter."""
    fits = call.process_set == 0 and call.kind in (abi.ALLREDUCE, abi.BROADCAST, abi.BARRIER) and not call.of_job
    return 0 if fits else call.job


def _forget() -> None:
    """After a shutdown: the next job may have another size, and other numbers of process sets.

    Waits for the programs that are still in flight, whose operations have failed: a Python callback which is in one
    when the interpreter ends would abort the process. JAX finds what it has traced by the function alone, in which this
    rank's number, the size and the sets are constants by now.
    """
    global _job
    _job += 1
    _glue.set_job(_job)
    drain()
    _trace_anew()


def _trace_anew() -> None:
    if jax.__version_info__ >= (0, 4, 30):
        jax.clear_caches()
        return
    # Before, jaxlib crashes where a key dies of a cache with weak references that was cleared: bodies of loops and
    # branches keep what was traced of them.
    clear, util.clear_all_weakref_lru_caches = util.clear_all_weakref_lru_caches, lambda: None
    try:
        jax.clear_caches()
    finally:
        util.clear_all_weakref_lru_caches = clear


def drain() -> Exception | None:
    """Waits for the programs that are in flight. Returns what one of them has failed with."""
    failure = None
    for token in [*runtime_tokens.current_tokens.values(), *runtime_tokens.output_runtime_tokens.values()]:
        try:
            token.block_until_ready()
        except Exception as e:
            failure = e
    runtime_tokens.clear()
    return failure


def _finish() -> None:
    """A script that ends without shutdown: JAX waits for its programs, and so the job lasts as long."""
    token = runtime_tokens.current_tokens.get(_effect)
    while token is not None and not getattr(token, "_buf", token).is_ready():  # an array in JAX 0.4.26 and older
        time.sleep(0.002)  # a wait in C would not see Ctrl-C


engine.before_checkpoint(settle)
engine.at_shutdown(_forget)
engine.at_exit(_finish, drain)
