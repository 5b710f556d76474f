"""Several backward passes for each reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from paceline.common.arguments import check_passes
from paceline.common.process_sets import ProcessSet, check_process_set, global_process_set
from paceline.tensorflow.gradients import ranks_of_averages


class LocalGradientAggregationHelper:
    """Adds up the gradients of several passes on this rank, and reduces the sum in the last one.

    allreduce_func: a function of (gradients, variables) that returns the gradients of all ranks.
    average_aggregated_gradients: divide the sum by the number of passes.
    sparse_as_dense: tf.IndexedSlices are added as dense tensors; without it they raise ValueError.
    scale_local_gradients: divide the gradients of variables that `register_local_var` names by the number of ranks in
    process_set.
    rank, optimizer_type, name: Horovod's, without effect.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
        sparse_as_dense: bool = False,
        average_aggregated_gradients: bool = False,
        rank: int = 0,
        optimizer_type: str = "",
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        check_passes(backward_passes_per_step)
        check_process_set(process_set)
        self.backward_passes_per_step = backward_passes_per_step
        self.allreduce_grads = allreduce_func
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = average_aggregated_gradients
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self.counter: Any = None
        self._sums: list[Any] = []
        self._local: list[Any] = []

    def register_local_var(self, var: Any) -> None:
        """Leaves a variable's gradient to this rank."""
        self._local.append(var)

    def compute_gradients(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients to apply after this pass.

        Before the last pass they are this rank's own, which `apply_gradients` drops.
        """
        places = [i for i, g in enumerate(grads) if g is not None]
        given = [self._dense(grads[i]) for i in places]
        if self.counter is None:
            with tf.init_scope():
                self.counter = _own(tf.constant(0))
                self._sums = [_own(tf.zeros(variables[i].shape, g.dtype)) for i, g in zip(places, given, strict=True)]
        if len(given) != len(self._sums):
            raise ValueError(f"gradients of {len(self._sums)} variables were added up so far, these are {len(given)}")
        sums = [s.assign_add(g, read_value=True) for s, g in zip(self._sums, given, strict=True)]
        with tf.control_dependencies(sums):
            passes = self.counter.assign_add(1, read_value=True)

        def reduce() -> list[tf.Tensor]:
            values = [tf.identity(s) for s in sums]
            if self.average_aggregated_gradients:
                values = [v / tf.cast(self.backward_passes_per_step, v.dtype) for v in values]
            reduced = self._reduced(values, [variables[i] for i in places])
            with tf.control_dependencies(reduced):
                cleared = [v.assign(tf.zeros_like(v), read_value=True) for v in (*self._sums, self.counter)]
            with tf.control_dependencies(cleared):
                return [tf.identity(g) for g in reduced]

        ready = tf.cond(passes >= self.backward_passes_per_step, reduce, lambda: given)
        result: list[Any] = [None] * len(grads)
        for i, grad in zip(places, ready, strict=True):
            result[i] = grad
        return result

    def _reduced(self, sums: list[tf.Tensor], variables: Sequence[Any]) -> list[tf.Tensor]:
        shared = [i for i, v in enumerate(variables) if not any(v is local for local in self._local)]
        given = self.allreduce_grads([sums[i] for i in shared], [variables[i] for i in shared])
        of_all = dict(zip(shared, given, strict=True))
        divides = self.scale_local_gradients and len(shared) < len(sums)
        by = ranks_of_averages(self.process_set) if divides else 1
        return [
            tf.convert_to_tensor(of_all[i]) if i in of_all else s / tf.cast(by, s.dtype) for i, s in enumerate(sums)
        ]

    def reset(self) -> None:
        """Drops what was added up since the last reduction."""
        if self.counter is not None:
            self.counter.assign(0)
            for s in self._sums:
                s.assign(tf.zeros_like(s))

    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies the gradients after the last pass; before, counts the iteration only.

        args: pairs of these gradients and variables. kwargs: in a graph of TensorFlow 1, global_step counts too.
        """
        grads = [g for g, _ in args[0] if g is not None] if args else []

        def apply() -> tf.Tensor:
            return _after([apply_grads_closure()], True)

        def skip() -> tf.Tensor:
            if getattr(optimizer, "iterations", None) is not None:
                optimizer.iterations.assign_add(1)
            step = kwargs.get("global_step")
            return _after([] if step is None else [step.assign_add(tf.ones([], step.dtype), read_value=False)], False)

        with tf.control_dependencies(grads):
            return tf.cond(tf.equal(self.counter.read_value(), 0), apply, skip)

    def _dense(self, grad: Any) -> tf.Tensor:
        if isinstance(grad, tf.IndexedSlices) and not self.sparse_as_dense:
            raise ValueError("tf.IndexedSlices are added up as dense tensors only: give sparse_as_dense=True")
        return tf.convert_to_tensor(grad)


def _own(initial: tf.Tensor) -> Any:
    """A variable that is not trained; a graph of TensorFlow 1 has it among those of this rank, as in Horovod."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        return tf.Variable(initial, trainable=False)
    local = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
    return tf.compat.v1.Variable(initial, trainable=False, collections=local, use_resource=True)


def _after(done: Sequence[Any], result: bool) -> tf.Tensor:
    """The result once operations have run: a graph of TensorFlow 1 runs only what results depend on."""
    with tf.control_dependencies([d for d in done if isinstance(d, (tf.Operation, tf.Tensor))]):
        return tf.constant(result)
