"""Compression: Compressors, which work on arrays as in Horovod, and codecs of the engine."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from paceline.common.compression import Codec, Codecs, parts_of
from paceline.common.operation import Options


class SupportsCompress(Protocol):
    """What a compressor of your own has."""

    def compress(self, tensor: jax.Array, /) -> tuple[jax.Array, Any]:
        """Returns the compressed array and the context for `decompress`."""

    def decompress(self, tensor: jax.Array, ctx: Any, /) -> jax.Array:
        """Returns the array, up to the loss of the compression."""


# What `compression=` takes: a compressor, a codec of the engine, or a codec's setting.
CompressionArgument = SupportsCompress | Codec | str


class NoneCompressor:
    """Sends arrays unchanged."""

    @staticmethod
    def compress(tensor: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the array itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: jax.Array, ctx: Any) -> jax.Array:
        """Returns the array itself."""
        return tensor


class FP16Compressor:
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


def split(compression: CompressionArgument) -> tuple[Any, Options]:
    """An operation's `compression`: a compressor for its arrays, and the options with the engine's codec."""
    return parts_of(compression, NoneCompressor)
