"""Compression: Compressors, which work on arrays as in Horovod, and codecs of the engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.common.compression import Codecs


class Compressor:
    """Compresses an array before an operation and decompresses the result. Subclass it for an algorithm of your own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the compressed array and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the array, up to the loss of the compression."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends arrays unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the array itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the array itself."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point arrays as float16, others unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Casts to float16. The context is the original type."""
        floating = np.issubdtype(tensor.dtype, np.floating)
        return (tensor.astype("float16") if floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Casts back to the original type."""
        return tensor.astype(ctx)


class Compression(Codecs):
    """Values for `compression=`: Horovod's `none` and `fp16`, and functions that make codecs."""

    none = NoneCompressor
    fp16 = FP16Compressor
