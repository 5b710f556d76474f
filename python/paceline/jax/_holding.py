"""The optimizer for models that let ranks run ahead: each rank steps alone, and the servers hold the parameters."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paceline.common import abi
from paceline.common.codec_tuning import resolved
from paceline.common.compression import Codec
from paceline.common.engine import engine
from paceline.common.operation import Options
from paceline.common.operators import Max
from paceline.common.process_sets import ProcessSet, process_set_number
from paceline.common.significance import Significance
from paceline.common.sync import Model, significance
from paceline.jax._collective import collective, settle
from paceline.jax._ops import allreduce, arrays_of, barrier, call_of, takes_part
from paceline.jax._state import DistributedState, Tree, byte_sizes, flags_of, is_traced, norm, offer, paths, with_gate

# How many optimizers hold their parameters on the servers, by generation of the engine: their numbers in names.
_holding: collections.Counter[int] = collections.Counter()


class Holding:
    """Ranks may run ahead: each steps alone, and the servers hold the parameters.

    Ranks outside of the process set step alone, and hold nothing.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str,
        op: int,
        process_set: ProcessSet,
        model: Model,
        codec: Codec | None,
        gate: Significance | None,
        pull_gate: Significance | None,
    ) -> None:
        self._optimizer, self._name, self._op = optimizer, name, op
        self._process_set, self._model = process_set, model
        self._codec, self._gate, self._pull_gate = codec, gate, pull_gate
        self._options = Options()
        # What is decided between iterations is decided on the host.
        self._decides = bool(model.has_supersteps or model.asks_significance or model.alone)
        self._age = 0  # steps since the last exchange
        self._kept: Tree = None  # changes since then, which the next exchange sends
        self._exchanges = 0
        self._declared: int | None = None  # in which generation of the engine
        _holding[engine.generation] += 1
        number = _holding[engine.generation]
        self._prefix = "value." if number == 1 else f"value{number}."

    def _names(self, params: Tree) -> list[str]:
        return [f"{self._prefix}{self._name}{path}" for path in paths(params)]

    def _use(self, params: Tree, use: int, arrays: Sequence[Any], **fields: Any) -> Tree:
        """An operation on the held parameters: their new values."""
        names = self._names(params)
        call = call_of(
            abi.ACCUMULATE,
            names,
            self._process_set,
            op=self._op,
            options=self._options,
            use=use,
            priorities=tuple(-i for i in range(len(names))),
            **fields,
        )
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(params), collective(call, arrays))

    def init(self, params: Tree) -> DistributedState:
        """Declares the parameters on the servers: the lowest rank's, or after a join those of the last to join."""
        self._check_place(params)
        if takes_part(self._process_set):
            if self._declared == engine.generation:  # programs may have the names of these values
                raise ValueError(
                    "init of this optimizer again: the servers hold its parameters already, and ranks go on from "
                    "these; make another with hvd.distributed_optimizer to begin with new parameters"
                )
            self._declare(params)
            if not is_traced(params):
                self._declared = engine.generation
        state = DistributedState(self._optimizer.init(params))
        return state if self._gate is None else with_gate(state, params)

    def _declare(self, params: Tree) -> None:
        arrays, _ = arrays_of(params, abi.ACCUMULATE, "distributed_optimizer")
        text = resolved(self._codec, byte_sizes(params), self._process_set)
        self._options = Options(self._model.exchanged, self._model.soft_park, text, self._pull_gate)
        self._use(params, abi.DECLARE, arrays, group=self._group(params), declared_by=self._process_set)
        self._age, self._kept, self._exchanges = 0, None, 0

    def _group(self, params: Tree) -> str | None:
        """The first value of those that are stepped together, under models with supersteps."""
        return self._names(params)[0] if self._model.has_supersteps else None

    def _check_place(self, tree: Tree) -> None:
        if self._decides and is_traced(tree):
            raise ValueError(
                f"sync={self._model.setting}: this model decides between iterations, which a jitted program does not "
                "see; call init and update outside of jax.jit, or use paceline.SSP, ASP, PSSP, DSPS or an Expression"
            )

    def step(self, grads: Tree, state: DistributedState, params: Tree, extra: Any) -> tuple[Tree, DistributedState]:
        """Steps with this rank's gradients, exchanges the change, and returns what leads to the held parameters."""
        if params is None:
            raise ValueError("where the servers hold the parameters, update needs them: update(grads, state, params)")
        self._check_place((grads, params))
        changes, inner = self._optimizer.update(grads, state.inner, params, **extra)
        state, empty = state._replace(inner=inner), None
        if not takes_part(self._process_set):
            return changes, state
        sent, self._kept = self._with_kept(changes), None
        if self._age < self._model.alone:
            self._kept, self._age = sent, self._age + 1
            return changes, state
        if self._gate is not None:
            sent, empty, state = offer(self._gate, sent, state, params)
        flags = flags_of(empty)
        arrays = [*flags, *jax.tree_util.tree_leaves(sent)]
        values = self._exchange(params, arrays, gated=bool(flags), significance=self._significance(grads, params))
        if self._gate is not None:
            values = jax.tree_util.tree_map(jnp.add, values, state.withheld)
        return jax.tree_util.tree_map(jnp.subtract, values, params), state

    def _with_kept(self, changes: Tree) -> Tree:
        return changes if self._kept is None else jax.tree_util.tree_map(jnp.add, self._kept, changes)

    def _significance(self, grads: Tree, params: Tree) -> float:
        """|g| / |w| over all parameters, L2, clipped to [0, 1], for models that use it."""
        if not self._model.asks_significance:
            return 0.0
        return significance(*((float(norm(a)) for a in jax.tree_util.tree_leaves(t)) for t in (grads, params)))

    def _exchange(self, params: Tree, arrays: Sequence[Any], **fields: Any) -> Tree:
        """Adds the changes, and reads when the model lets this rank continue."""
        group = self._group(params)
        number = process_set_number(self._process_set)
        use = abi.ADD | abi.READ
        if group is not None:
            jax.block_until_ready(arrays)  # the iteration ends with its changes
            settle()
            if not engine.end_iteration(number, group):
                use = abi.ADD | abi.READ_NOW | abi.WITHIN
        values = self._use(params, use, arrays, **fields)
        if group is not None:
            engine.begin_iteration(number, group)
        self._age, self._exchanges = 0, self._exchanges + 1
        return values

    def agree(self, params: Tree) -> Tree:
        """The sum of all ranks' changes, which is the same on all ranks. Every rank calls it, at the same place."""
        if not takes_part(self._process_set):
            return params
        arrays, _ = arrays_of(params, abi.ACCUMULATE, "agree")
        if self._model.alone:
            self._send_kept(params)
        barrier(self._process_set)  # after all ranks' own changes
        values = self._use(params, abi.READ_NOW | abi.EXACT, arrays)
        barrier(self._process_set)  # no rank continues before all have read
        return values

    def _send_kept(self, params: Tree) -> None:
        """Ends the exchange that is not due yet on every rank, so that all are at the same one afterwards."""
        zeros = jax.tree_util.tree_map(jnp.zeros_like, params)
        changes, self._kept, self._age = zeros if self._kept is None else self._kept, None, 0
        self._exchanges += 1
        # Before the ranks compare: others may wait for this exchange.
        self._use(params, abi.ADD | abi.READ_NOW, jax.tree_util.tree_leaves(changes))
        most = int(allreduce(jnp.int32(self._exchanges), op=Max, process_set=self._process_set))
        for _ in range(self._exchanges, most):  # of a rank that made more iterations
            self._use(params, abi.ADD | abi.READ_NOW, jax.tree_util.tree_leaves(zeros))
        self._exchanges = most
