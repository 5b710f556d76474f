"""Compression: Compressors, which work on tensors as in Horovod, and codecs of the engine."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from paceline.common.compression import Codec, Codecs, parts_of
from paceline.common.operation import Options


class SupportsCompress(Protocol):
    """What `Compressor` declares; a class with these methods need not be derived from it."""

    def compress(self, tensor: torch.Tensor, /) -> tuple[torch.Tensor, Any]:
        """Returns the compressed tensor and the context for `decompress`."""

    def decompress(self, tensor: torch.Tensor, ctx: Any, /) -> torch.Tensor:
        """Returns the tensor, up to the loss of the compression."""


# What `compression=` takes: a Compressor, a codec of the engine, or a codec's setting.
CompressionArgument = SupportsCompress | Codec | str


class Compressor:
    """Compresses a tensor before an operation and decompresses the result. Subclass it for an algorithm of your own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the compressed tensor and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the tensor, up to the loss of the compression."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the tensor itself."""
        return tensor


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


def split(compression: CompressionArgument) -> tuple[Any, Options]:
    """An operation's `compression`: a Compressor for its tensors, and the options with the engine's codec."""
    return parts_of(compression, NoneCompressor)
