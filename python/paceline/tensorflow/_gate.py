"""The changes that a rank withholds under `gate=`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from paceline.common import checkpoint
from paceline.common.engine import engine
from paceline.common.gate import State, dump, load
from paceline.common.significance import Significance


class Gate:
    """Withholds changes of one tensor that are not significant, and adds them up.

    Its state is variables, so that a tf.function which is traced once changes it in each call.
    """

    def __init__(self, rule: Significance, key: tuple[int, str], like: tf.Tensor) -> None:
        self._rule = rule
        with tf.init_scope():
            self.iteration = tf.Variable(1, dtype=tf.int64, trainable=False)
            self.withheld = tf.Variable(tf.zeros(like.shape, like.dtype), trainable=False)
        _gates.add(key, self)

    def offer(self, contribution: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """(the contribution plus what was withheld, whether that is too small, so that it is withheld).

        Changes that are not finite are never too small. Ends an iteration of the gate.
        """
        threshold = self._rule.threshold / tf.cast(self.iteration, tf.float32) ** self._rule.decay
        total = contribution + self.withheld
        small = _norm(total) < tf.cast(threshold, _wide(total.dtype)) * _norm(tf.cast(weights, total.dtype))
        self.withheld.assign(tf.where(small, total, tf.zeros_like(total)))
        self.iteration.assign_add(1)
        return total, small

    def clear(self) -> None:
        """Drops what is withheld."""
        with tf.init_scope():
            self.withheld.assign(tf.zeros_like(self.withheld))

    def begin(self) -> None:
        """Drops what was withheld before the join or init after which servers hold the parameter anew."""
        if _gates.loaded_in != engine.generation:
            self.clear()


def gate_of(variable: Any, name: str | None, rule: Significance, process_set: int, like: tf.Tensor) -> Gate:
    """The gate of a variable's gradient, which lives as long as the variable does. Raises ValueError for others."""
    passing = isinstance(variable, tf.Tensor) and not isinstance(variable, tf.Variable)
    if name is None or passing or not tf.compat.v1.executing_eagerly_outside_functions():
        raise ValueError("gate=: gates are for the gradients of variables, eagerly and in tf.function")
    if not like.shape.is_fully_defined() or not like.dtype.is_floating:
        raise ValueError(f"gate=: {name!r} has type {like.dtype.name} and shape {like.shape}; give one of numbers")
    gates: dict[tuple[int, str], tuple[Significance, Gate]] = variable.__dict__.setdefault("_paceline_gates", {})
    key = process_set, name
    if key not in gates or gates[key][0] != rule:
        gates[key] = rule, Gate(rule, key, like)
    return gates[key][1]


def _wide(dtype: tf.DType) -> tf.DType:
    """In float16 the norm of many elements is infinite."""
    return dtype if dtype == tf.float64 else tf.float32


def _norm(tensor: tf.Tensor) -> tf.Tensor:
    return tf.norm(tf.cast(tensor, _wide(tensor.dtype)))


class _Gates:
    """All gates of this process, as a part of its checkpoint.

    A loaded state waits here until its gate exists.
    """

    def __init__(self) -> None:
        self._gates: weakref.WeakValueDictionary[tuple[int, str], Gate] = weakref.WeakValueDictionary()
        self._unclaimed: State = {}
        self.loaded_in = -1  # generation of the engine in which a state was loaded last

    def add(self, key: tuple[int, str], gate: Gate) -> None:
        self._gates[key] = gate
        self._claim()

    def clear(self) -> None:
        """Drops what all gates withhold: it belongs to the steps of a job that has ended."""
        for gate in list(self._gates.values()):
            gate.clear()

    def _claim(self) -> None:
        with tf.init_scope():
            for key, gate in list(self._gates.items()):
                iteration, withheld = self._unclaimed.pop(key, (1, None))
                if withheld is not None and withheld.shape == tuple(gate.withheld.shape):
                    gate.iteration.assign(iteration)
                    gate.withheld.assign(tf.cast(withheld, gate.withheld.dtype))

    def state(self) -> bytes:
        """The state of all gates."""
        state = dict(self._unclaimed)
        for key, gate in self._gates.items():
            wide = tf.cast(gate.withheld, _wide(gate.withheld.dtype))
            state[key] = int(gate.iteration), wide.numpy()
        return dump(dict(sorted(state.items()))) if state else b""

    def reader(self, state: bytes) -> Callable[[], None]:
        try:
            loaded: State = load(state) if state else {}
            for (number, name), (iteration, _) in loaded.items():
                if [type(number), type(name), type(iteration)] != [int, str, int] or iteration < 1:
                    raise TypeError
        except Exception as e:  # NumPy raises KeyError, zipfile's errors and others for broken bytes
            raise ValueError("these bytes are not what gates hold back") from e

        def restore() -> None:
            self._unclaimed, self.loaded_in = loaded, engine.generation
            for key, gate in list(self._gates.items()):
                if key not in loaded:
                    gate.iteration.assign(1)
                    gate.clear()
            self._claim()

        return restore


_gates = _Gates()
checkpoint.register("tensorflow.gates", _gates)
engine.at_shutdown(_gates.clear)
