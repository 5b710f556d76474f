"""Compression: Compressors, which work on arrays as in Horovod, and codecs of the engine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from paceline.common.compression import Codecs, Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Sends floating-point arrays as float16, others unchanged."""

    @staticmethod
    def compress(tensor: jax.Array) -> tuple[jax.Array, Any]:
        """Casts to float16. The context is the original type."""
        return (tensor.astype(jnp.float16) if jnp.issubdtype(tensor.dtype, jnp.floating) else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: jax.Array, ctx: Any) -> jax.Array:
        """Casts back to the original type."""
        return tensor.astype(ctx)


class Compression(Codecs):
    """Values for `compression=`: Horovod's `none` and `fp16`, and functions that make codecs."""

    none = NoneCompressor
    fp16 = FP16Compressor
