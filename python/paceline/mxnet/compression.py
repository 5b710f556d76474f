"""Compression: Compressors, which work on arrays as in Horovod, and codecs of the engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.common.compression import Codecs, Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


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
