"""Several backward passes for each reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class LocalGradientAggregationHelper:
    """Adds up the gradients of several passes on this rank, and reduces the sum in the last one.

    allreduce_func: a function of (gradients, variables) that returns the gradients of all ranks.
    average_aggregated_gradients: divide the sum by the number of passes.
    sparse_as_dense: tf.IndexedSlices are added as dense tensors; without it they raise ValueError.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
        sparse_as_dense: bool = False,
        average_aggregated_gradients: bool = False,
    ) -> None:
        if backward_passes_per_step < 1:
            raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: at least 1")
        self.backward_passes_per_step = backward_passes_per_step
        self.allreduce_grads = allreduce_func
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = average_aggregated_gradients
        self.counter: Any = None
        self._sums: list[Any] = []

    def compute_gradients(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients to apply after this pass.

        Before the last pass they are this rank's own, which `apply_gradients` drops.
        """
        places = [i for i, g in enumerate(grads) if g is not None]
        given = [self._dense(grads[i]) for i in places]
        if self.counter is None:
            with tf.init_scope():
                self.counter = tf.Variable(0, dtype=tf.int32, trainable=False)
                self._sums = [
                    tf.Variable(tf.zeros(variables[i].shape, g.dtype), trainable=False)
                    for i, g in zip(places, given, strict=True)
                ]
        if len(given) != len(self._sums):
            raise ValueError(f"gradients of {len(self._sums)} variables were added up so far, these are {len(given)}")
        sums = [s.assign_add(g, read_value=True) for s, g in zip(self._sums, given, strict=True)]
        with tf.control_dependencies(sums):
            passes = self.counter.assign_add(1, read_value=True)

        def reduce() -> list[tf.Tensor]:
            values = [tf.identity(s) for s in sums]
            if self.average_aggregated_gradients:
                values = [v / tf.cast(self.backward_passes_per_step, v.dtype) for v in values]
            reduced = [tf.convert_to_tensor(g) for g in self.allreduce_grads(values, [variables[i] for i in places])]
            with tf.control_dependencies(reduced):
                for s in self._sums:
                    s.assign(tf.zeros_like(s))
                self.counter.assign(0)
            return reduced

        ready = tf.cond(passes >= self.backward_passes_per_step, reduce, lambda: given)
        result: list[Any] = [None] * len(grads)
        for i, grad in zip(places, ready, strict=True):
            result[i] = grad
        return result

    def reset(self) -> None:
        """Drops what was added up since the last reduction."""
        if self.counter is not None:
            self.counter.assign(0)
            for s in self._sums:
                s.assign(tf.zeros_like(s))

    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies the gradients after the last pass; before, counts the iteration only."""

        def apply() -> tf.Tensor:
            apply_grads_closure()
            return tf.constant(True)

        def skip() -> tf.Tensor:
            optimizer.iterations.assign_add(1)
            return tf.constant(False)

        return tf.cond(tf.equal(self.counter, 0), apply, skip)

    def _dense(self, grad: Any) -> tf.Tensor:
        if isinstance(grad, tf.IndexedSlices) and not self.sparse_as_dense:
            raise ValueError("tf.IndexedSlices are added up as dense tensors only: give sparse_as_dense=True")
        return tf.convert_to_tensor(grad)
