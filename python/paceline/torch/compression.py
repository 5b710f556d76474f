"""Compression: Compressors, which work on tensors as in Horovod, and codecs of the engine."""

from __future__ import annotations

from typing import Any

import torch

from paceline.common.compression import Codecs, Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16, others unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Casts to float16. The context is the original type."""
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Casts back to the original type."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression(Codecs):
    """Values for `compression=`: Horovod's `none` and `fp16`, and functions that make codecs."""

    none = NoneCompressor
    fp16 = FP16Compressor
