"""DistributedOptimizer, for optimizers of Keras and of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from paceline.common.operators import Average
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.tensorflow.compression import Compression
from paceline.tensorflow.gradients import Reduction


class _DistributedV1:
    """Stands before the wrapped class, an optimizer of TensorFlow 1."""

    _reduction: Reduction

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The gradients of all ranks with their variables."""
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        variables = [v for _, v in pairs]
        return list(zip(self._reduction([g for g, _ in pairs], variables), variables, strict=True))


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
    tf.compat.v1.train.Optimizer, for which backward_passes_per_step is 1. The arguments are those of
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
    if backward_passes_per_step != 1 or gate is not None or pull_gate is not None:
        raise ValueError("backward_passes_per_step, gate and pull_gate work with optimizers of Keras only")
    reduction = Reduction(
        compression, sparse_as_dense, op, gradient_predivide_factor, num_groups or groups, process_set, sync,
        scale_local_gradients,
    )  # fmt: skip
    kind = type(optimizer)
    wrapped: Any = object.__new__(type(kind.__name__, (_DistributedV1, kind), {"__module__": __name__}))
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped._reduction = reduction
    return wrapped
