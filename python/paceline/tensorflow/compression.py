"""Compression: Compressors, which work on tensors as in Horovod, and codecs of the engine."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from paceline.common.compression import Codecs, Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16, others unchanged."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Casts to float16. The context is the original type."""
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Casts back to the original type."""
        return tf.cast(tensor, ctx) if ctx.is_floating else tensor


class Compression(Codecs):
    """Values for `compression=`: Horovod's `none` and `fp16`, and functions that make codecs."""

    none = NoneCompressor
    fp16 = FP16Compressor
