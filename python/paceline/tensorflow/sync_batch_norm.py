"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from paceline.common.engine import engine
from paceline.common.operators import Sum
from paceline.tensorflow.mpi_ops import allreduce


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """keras.layers.BatchNormalization with the statistics of all ranks' batches together.

    The batches may have different sizes. Masks and `renorm` are not taken: ValueError.
    """

    def _moments(self, inputs: Any, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        if not engine.is_initialized() or engine.size() == 1:
            return super()._moments(inputs, mask)
        if mask is not None:
            raise ValueError("SyncBatchNormalization takes no mask")
        x = tf.cast(inputs, tf.float32) if inputs.dtype in (tf.float16, tf.bfloat16) else tf.convert_to_tensor(inputs)
        axes = [i for i in range(x.shape.rank) if i != self.axis % x.shape.rank]
        values = tf.cast(tf.size(x) / tf.shape(x)[self.axis], x.dtype)
        total = allreduce(tf.concat([[values], tf.reduce_sum(x, axes)], 0), op=Sum)
        mean = total[1:] / total[0]
        shape = [1] * x.shape.rank
        shape[self.axis] = x.shape[self.axis]
        squares = tf.reduce_sum(tf.square(x - tf.reshape(mean, shape)), axes)
        variance = allreduce(squares, op=Sum) / total[0]
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)
