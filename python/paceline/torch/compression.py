"""Compression of what is sent: none, or 16-bit floats."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Compresses a tensor before it is sent and decompresses the result. Subclass it for an algorithm of your own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the compressed tensor and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the tensor as it was before, up to what compression lost."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16; others as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Casts to float16. The context is the type to come back to."""
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Casts back to the tensor's own type."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The compressors that operations and DistributedOptimizer take."""

    none = NoneCompressor
    fp16 = FP16Compressor
