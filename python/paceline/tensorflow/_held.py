"""Models that let ranks run ahead: each rank steps alone, and the servers hold the parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from paceline.common import abi
from paceline.common.declaring import declaring
from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError
from paceline.common.handles import start, synchronize
from paceline.common.objects import newest
from paceline.common.operation import Held, How, Options, operation
from paceline.common.operators import Max
from paceline.common.process_sets import ProcessSet, place_in, process_set_number
from paceline.common.significance import Significance
from paceline.common.sync import Model
from paceline.tensorflow._gate import Gate, gate_of
from paceline.tensorflow._variables import label_of
from paceline.tensorflow.functions import broadcast_variables
from paceline.tensorflow.mpi_ops import allreduce, barrier, exchange_changes

_TYPES = {tf.float16: abi.FLOAT16, tf.bfloat16: abi.BFLOAT16, tf.float32: abi.FLOAT32, tf.float64: abi.FLOAT64}


class Holding:
    """Steps with this rank's own gradients, adds the changes to the held parameters, and continues with these.

    The first step declares the parameters, with the lowest rank's values, as does the first one after a join (with
    those of the last rank to join) or another init. Other changes of parameters between steps are overwritten. A
    function that was traced before is refused.
    """

    def __init__(
        self, model: Model, op: int, process_set: ProcessSet, codec: str | None, gate: Significance | None,
        pull_gate: Significance | None,
    ) -> None:  # fmt: skip
        self._model, self._op, self._process_set, self._gate = model, op, process_set, gate
        self._options = Options(model.exchanged, model.soft_park, codec, pull_gate)
        self._generation = -1
        self._names: dict[int, str] = {}  # by id of the variable
        self._variables: list[Any] = []  # the declared ones
        self._age: Any = None  # iterations since the last exchange, and the changes since then, with a cached model
        self._kept: list[Any] = []
        self._exchanges: Any = None

    def set_codec(self, text: str | None) -> None:
        """Has the parameters coded, before they are declared."""
        self._options = dataclasses.replace(self._options, codec=text)

    def apply(self, grads: Sequence[Any], variables: Sequence[Any], apply: Callable[[Any], Any]) -> Any:
        """Makes the wrapped optimizer's step by `apply(grads)` and exchanges the changes. Returns what it returns."""
        if not self._process_set.included() or place_in(self._process_set)[1] == 1:
            return apply(grads)
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise ValueError(f"sync={self._model.setting}: ranks run ahead eagerly and in tf.function only")
        variables = [v for v in variables if _value(v).dtype in _TYPES]
        with tf.init_scope():
            self._declare(variables)
        before = [_value(v) for v in variables]
        with tf.control_dependencies(before):
            result = apply(grads)
        after = [_value(v) for v in variables]
        significance = _significance(grads, after) if self._model.asks_significance else tf.zeros([])
        changes = [a - b for a, b in zip(after, before, strict=True)]
        if self._model.alone:
            self._keep_or_exchange(variables, changes, significance)
        else:
            self._exchange(variables, changes, after, significance)
        return result

    def _exchange(
        self, variables: Sequence[Any], changes: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], significance: Any
    ) -> None:
        """Sends the changes, and stores the values that come back."""
        gates: list[Gate | None] = [None] * len(variables)
        empty = tf.zeros([len(variables)], tf.uint8)
        if self._gate is not None:
            number = process_set_number(self._process_set)
            gates = [
                gate_of(v, self._names[id(v)], self._gate, number, c) for v, c in zip(variables, changes, strict=True)
            ]
            offered = [g.offer(c, w) for g, c, w in zip(gates, changes, weights, strict=True) if g is not None]
            changes = [total for total, _ in offered]
            empty = tf.cast(tf.stack([small for _, small in offered]), tf.uint8)
        group = self._names[id(self._variables[0])]
        with tf.control_dependencies([empty, *changes]):
            within = self._ends_iteration(group) if self._model.has_supersteps else tf.constant(False)
        values = exchange_changes(
            changes,
            [self._names[id(v)] for v in variables],
            How(self._op, process_set=self._process_set, options=self._options),
            empty,
            significance,
            within,
        )
        for variable, value, gate in zip(variables, values, gates, strict=True):
            variable.assign(value if gate is None else value + gate.withheld)
        if self._model.has_supersteps:
            with tf.control_dependencies(values):
                number = process_set_number(self._process_set)
                _call(lambda: _began(number, group))

    def _ends_iteration(self, group: str) -> tf.Tensor:
        """Ends an iteration when it runs. Whether the superstep continues."""
        number = process_set_number(self._process_set)
        return _call(lambda: not engine.end_iteration(number, group))

    def _keep_or_exchange(self, variables: Sequence[Any], changes: Sequence[tf.Tensor], significance: Any) -> None:
        sums = [k.assign_add(c, read_value=True) for k, c in zip(self._kept, changes, strict=True)]

        def exchange() -> tf.Tensor:
            self._exchange(variables, [tf.identity(s) for s in sums], [_value(v) for v in variables], significance)
            for kept in self._kept:
                kept.assign(tf.zeros_like(kept))
            self._exchanges.assign_add(1)
            return self._age.assign(0, read_value=True)

        def keep() -> tf.Tensor:
            return self._age.assign_add(1, read_value=True)

        tf.cond(tf.greater_equal(self._age, self._model.alone), exchange, keep)

    def _declare(self, variables: Sequence[Any]) -> None:
        """Declares what is not declared in this generation."""
        if self._generation != engine.generation:
            self._generation = engine.generation
            self._names, self._variables, self._kept = {}, [], []
            self._age = tf.Variable(0, trainable=False) if self._model.alone else None
            self._exchanges = tf.Variable(0, trainable=False) if self._model.alone else None
        new = [v for v in variables if id(v) not in self._names]
        if not new:
            return
        if self._variables and (self._model.has_supersteps or self._model.alone):
            raise ValueError(f"sync={self._model.setting}: all variables are stepped together from the first step on")
        values = [_value(v).numpy() for v in new]
        for variable, value in zip(new, values, strict=True):
            if value.shape != variable.shape:
                raise ValueError(
                    f"{label_of(variable)} has no value yet where the first step is traced: build the model before, by "
                    "a keras.Input as its first layer or by model.build(input_shape)"
                )
        with declaring(self._process_set) as name_of:
            names = {id(v): name_of(label_of(v)) for v in new}
            first = names[id(new[0])]
            held = Held(abi.DECLARE, group=first if self._model.has_supersteps else None)
            root = newest(self._process_set, first)
            self._names |= names
            try:
                self._host(new, held, given=values, root=root)
            except HorovodInternalError:
                for variable in names:
                    del self._names[variable]
                raise
        self._variables += new
        if self._model.alone:
            self._kept = [tf.Variable(tf.zeros_like(_value(v)), trainable=False) for v in new]
        if self._gate is not None:
            number = process_set_number(self._process_set)
            for variable in new:
                gate_of(variable, self._names[id(variable)], self._gate, number, _value(variable)).begin()

    def _host(
        self,
        variables: Sequence[Any],
        held: Held,
        given: Sequence[Any] | None = None,
        empty: bool = False,
        root: int = 0,
    ) -> None:
        """An operation on values outside of any graph. Those that are read are stored in the variables.

        root: whose values they are from their declaration on.
        """
        reads = held.use != abi.ADD
        arrays = [_value(v).numpy() for v in variables] if given is None else given
        sources = [np.array(a, order="C") for a in arrays]
        ops = [
            operation(
                abi.ACCUMULATE,
                _TYPES[_value(v).dtype],
                a.shape,
                0 if held.use == abi.READ_NOW | abi.EXACT or not a.size else a.ctypes.data,
                a.ctypes.data if reads and a.size else 0,
                reduce_op=self._op,
                process_set=process_set_number(self._process_set),
                root=root,
                name=self._names[id(v)],
                options=self._options,
                held=held,
                empty=empty,
            )
            for v, a in zip(variables, sources, strict=True)
        ]
        results = synchronize(start(ops, lambda _: sources, at_once=True))
        for variable, value in zip(variables, results if reads else (), strict=reads):
            variable.assign(value)

    def agree(self, trained: Sequence[Any] | None) -> None:
        """Waits for all ranks, then gives them the same parameters: the sum of all their changes.

        trained: the parameters, also of a rank that has made no step; None where they are known from steps alone.
        """
        if not self._process_set.included() or place_in(self._process_set)[1] == 1:
            return
        if self._generation != engine.generation and engine.last_joined is not None:
            # Nothing is held any more: the last to join has the newest.
            variables = [v for v in trained or self._variables if _value(v).dtype in _TYPES]
            if not variables:
                raise ValueError(
                    "agree() after join() on a rank that has made no step: build the optimizer before, by "
                    "optimizer.build(model.trainable_variables), so that it knows the parameters"
                )
            broadcast_variables(variables, newest(self._process_set, "paceline.agree"), self._process_set)
            return
        if self._generation != engine.generation or not self._variables:
            return
        if self._model.alone:
            self._send_kept()
        self._read()  # after this rank's own changes, so that these have arrived
        barrier(self._process_set)
        self._read()
        barrier(self._process_set)  # no rank continues before all have read

    def _send_kept(self) -> None:
        """Ends the exchange that is not due yet on every rank, so that all are at the same one afterwards."""
        self._host(self._variables, Held(abi.ADD), given=[k.numpy() for k in self._kept])
        for kept in self._kept:
            kept.assign(tf.zeros_like(kept))
        self._age.assign(0)
        self._exchanges.assign_add(1)
        most = int(allreduce(tf.identity(self._exchanges), op=Max, process_set=self._process_set))
        while int(self._exchanges) < most:  # a rank that made more iterations
            self._host(self._variables, Held(abi.ADD), empty=True)
            self._exchanges.assign_add(1)

    def _read(self) -> None:
        self._host(self._variables, Held(abi.READ_NOW | abi.EXACT))

    @property
    def outdated(self) -> bool:
        """Whether what was traced is of an earlier job, or from before a join."""
        return self._generation not in (-1, engine.generation)


def _began(number: int, group: str) -> bool:
    engine.begin_iteration(number, group)
    return True


def _value(variable: Any) -> tf.Tensor:
    return tf.convert_to_tensor(variable)


def _call(ask: Callable[[], bool]) -> tf.Tensor:
    """Asks when the graph runs."""
    result = tf.numpy_function(lambda: np.bool_(ask()), [], tf.bool)
    result.set_shape([])
    return result


def _significance(grads: Sequence[Any], weights: Sequence[tf.Tensor]) -> tf.Tensor:
    """|g| / |w| over all parameters, L2, clipped to [0, 1]."""
    given = [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in grads if g is not None]
    ratio = tf.linalg.global_norm(given) / tf.linalg.global_norm([tf.cast(w, tf.float32) for w in weights])
    return tf.where(tf.math.is_nan(ratio), 1.0, tf.minimum(ratio, 1.0))
