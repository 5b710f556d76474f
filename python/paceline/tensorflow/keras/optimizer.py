"""DistributedOptimizer for Keras 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras.src.trainers import trainer

from paceline.common.operators import Average
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.tensorflow.compression import Compression
from paceline.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from paceline.tensorflow.gradients import Reduction, local_variables


class Distributed:
    """Stands before the wrapped optimizer's class."""

    _paceline_reduction: Reduction
    _paceline_passes: LocalGradientAggregationHelper | None

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Reduces the gradients over all ranks, and applies them."""
        given = self._trainable_variables if trainable_variables is None else trainable_variables  # type: ignore[attr-defined]
        variables = list(given)
        if self._paceline_passes is None:
            return super().apply(self._paceline_reduction(grads, variables), trainable_variables)  # type: ignore[misc]
        if not self.built:  # type: ignore[has-type]
            self.build(variables)  # type: ignore[attr-defined]
            self.built = True
        reduced = self._paceline_passes.compute_gradients(grads, variables)
        apply = super().apply  # type: ignore[misc]
        return self._paceline_passes.apply_gradients(lambda: apply(reduced, trainable_variables), self)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    sync: Any = None,
) -> Any:
    """Wraps a Keras optimizer so that gradients are reduced over all ranks before they are applied.

    The result is an optimizer of the same class and configuration, and with the same state if it has one already.
    Models that are compiled with it do not use XLA, which has no such operations, unless compile is told
    jit_compile=True.

    backward_passes_per_step: the number of passes whose gradients add up before they are reduced; divided by it with
    average_aggregated_gradients. `iterations` counts passes. The other arguments are those of
    `paceline.tensorflow.DistributedGradientTape`.
    """
    if isinstance(optimizer, Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    kind = type(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"expected an optimizer of Keras 3, got {kind.__module__}.{kind.__name__}")
    reduction = Reduction(
        compression, sparse_as_dense, op, gradient_predivide_factor, num_groups or groups, process_set, sync,
        scale_local_gradients,
    )  # fmt: skip
    derived: Any = type(kind.__name__, (Distributed, kind), {"__module__": kind.__module__})
    wrapped = derived.from_config(optimizer.get_config() | ({"name": name} if name else {}))
    if optimizer.built:
        wrapped.build(optimizer._trainable_variables)
        for to, value in zip(wrapped.variables, optimizer.variables, strict=True):
            to.assign(value)
    wrapped._paceline_reduction = reduction
    wrapped._paceline_passes = None
    if backward_passes_per_step != 1:
        wrapped._paceline_passes = LocalGradientAggregationHelper(
            backward_passes_per_step, reduction, sparse_as_dense, average_aggregated_gradients
        )
    return wrapped


def PartialDistributedOptimizer(optimizer: Any, *args: Any, local_layers: Any = None, **options: Any) -> Any:
    """DistributedOptimizer that leaves the gradients of `local_layers`' variables to this rank."""
    wrapped = DistributedOptimizer(optimizer, *args, **options)
    wrapped._paceline_reduction.local_variables.extend(local_variables(local_layers))
    return wrapped


_model_supports_jit = trainer.model_supports_jit


def _supports_jit(model: Any) -> bool:
    """Keras's choice for jit_compile="auto": not with a DistributedOptimizer."""
    return not isinstance(getattr(model, "optimizer", None), Distributed) and _model_supports_jit(model)


trainer.model_supports_jit = _supports_jit
