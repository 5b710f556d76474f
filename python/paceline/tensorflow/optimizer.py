"""DistributedOptimizer, for optimizers of Keras and of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from paceline.common.arguments import check_passes, warn_of_momentum
from paceline.common.compression import codec_of
from paceline.common.operators import Average
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.tensorflow._variables import has_momentum
from paceline.tensorflow.compression import Compression
from paceline.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from paceline.tensorflow.gradients import Reduction, groups_of


class _DistributedV1:
    """Stands before the wrapped class, an optimizer of TensorFlow 1."""

    _reduction: Reduction
    _passes: LocalGradientAggregationHelper | None

    def register_local_var(self, var: Any) -> None:
        """Leaves a variable's gradient to this rank."""
        self._reduction.local_variables.append(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The gradients of all ranks with their variables."""
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        variables = [v for _, v in pairs]
        reduce = self._reduction if self._passes is None else self._passes.compute_gradients
        return list(zip(reduce([g for g, _ in pairs], variables), variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: Any = None
    ) -> Any:
        """Applies gradients of `compute_gradients`; of several passes, after the last of them."""
        pairs, apply = list(grads_and_vars), super().apply_gradients  # type: ignore[misc]
        if self._passes is None:
            return apply(pairs, global_step, name)
        given = self._passes.apply_gradients(
            lambda: apply(pairs, global_step, name), None, pairs, global_step=global_step
        )
        return given if tf.executing_eagerly() else tf.group(given)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    sync: Any = None,
    gate: Any = None,
    pull_gate: Any = None,
) -> Any:
    """Wraps an optimizer so that gradients are reduced over all ranks before they are applied.

    optimizer: one of Keras, for which this is paceline.keras.DistributedOptimizer, or a
    tf.compat.v1.train.Optimizer, which takes no gate and no pull_gate. The arguments are those of
    `DistributedGradientTape`, and backward_passes_per_step the number of passes whose gradients add up first, divided
    by it with average_aggregated_gradients. use_locking, device_dense, device_sparse: Horovod's, without effect.

    Raises ValueError for what is no optimizer, and for arguments that its kind does not take.
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        from paceline.tensorflow.keras.optimizer import DistributedOptimizer as of_keras

        return of_keras(
            optimizer,
            name,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
            sync=sync,
            gate=gate,
            pull_gate=pull_gate,
        )
    if gate is not None or pull_gate is not None:
        raise ValueError("gate and pull_gate work with optimizers of Keras only")
    check_passes(backward_passes_per_step)
    reduction = Reduction(
        compression, sparse_as_dense, op, gradient_predivide_factor, groups_of(num_groups, groups), process_set, sync,
        scale_local_gradients,
    )  # fmt: skip
    warn_of_momentum(codec_of(compression), lambda: has_momentum(optimizer))
    kind = type(optimizer)
    wrapped: Any = object.__new__(type(kind.__name__, (_DistributedV1, kind), {"__module__": __name__}))
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped._reduction, wrapped._passes = reduction, None
    if backward_passes_per_step != 1:
        wrapped._passes = LocalGradientAggregationHelper(
            backward_passes_per_step, reduction, sparse_as_dense, average_aggregated_gradients
        )
    return wrapped
