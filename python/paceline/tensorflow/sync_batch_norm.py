"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from paceline.common.engine import engine
from paceline.common.operators import Sum
from paceline.tensorflow._glue import unusable
from paceline.tensorflow.mpi_ops import allreduce

# Keras 3 calls _moments(inputs, mask), Keras 2 _moments(inputs, reduction_axes, keep_dims, mask=None).
try:
    _moments = inspect.signature(tf.keras.layers.BatchNormalization._moments)
except AttributeError as e:
    raise unusable(e) from e
_takes_masks_alone = "reduction_axes" not in _moments.parameters


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """keras.layers.BatchNormalization with the statistics of all ranks' batches together.

    Input (N, ..., C), or by `axis` another order: N may differ between ranks. The arguments are those of
    BatchNormalization. Raises ValueError for `renorm`, `virtual_batch_size`, `fused`, masks and several axes.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        if options.get("renorm") or options.get("virtual_batch_size"):
            raise ValueError("SyncBatchNormalization takes no renorm and no virtual_batch_size")
        if options.pop("fused", False) is not False:
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if not _takes_masks_alone:
            options["fused"] = False  # a kernel that computes the moments of this rank's batch
        super().__init__(*args, **options)

    def _moments(self, inputs: Any, *how: Any, **options: Any) -> tuple[tf.Tensor, tf.Tensor]:
        mask = options.get("mask", how[0] if how and _takes_masks_alone else None)
        if not engine.is_initialized() or engine.size() == 1:
            return super()._moments(inputs, *how, **options)
        if mask is not None:
            raise ValueError("SyncBatchNormalization takes no mask")
        x = tf.cast(inputs, tf.float32) if inputs.dtype in (tf.float16, tf.bfloat16) else tf.convert_to_tensor(inputs)
        given = list(self.axis) if isinstance(self.axis, (list, tuple)) else [self.axis]
        if len(given) != 1:
            raise ValueError(f"SyncBatchNormalization takes one axis, not {given}")
        axis = given[0] % x.shape.rank
        axes = [i for i in range(x.shape.rank) if i != axis]
        values = tf.cast(tf.size(x) / tf.shape(x)[axis], x.dtype)
        mean = _mean(values, tf.reduce_sum(x, axes))
        shape = [1] * x.shape.rank
        shape[axis] = x.shape[axis]
        variance = _mean(values, tf.reduce_sum(tf.square(x - tf.reshape(mean, shape)), axes))
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)


def _mean(values: tf.Tensor, sums: tf.Tensor) -> tf.Tensor:
    """The mean of all ranks' values, of each channel. An elastic job may lose ranks from one sum to the next."""
    total = allreduce(tf.concat([[values], sums], 0), op=Sum, compression="none")
    return total[1:] / total[0]
