"""What `compression=` of operations and optimizers takes, for all frameworks: Compressors and codecs.

Compressors work on tensors before the engine has them: `none`, each framework's `fp16`, and those of your own. Codecs
work within the engine, on one partition while others are sent. Tensors of fewer than 1024 elements or of integers, and
reductions other than Average and Sum, are not coded. The package core/codec says what each codec costs and when it
loses.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any, Protocol

from paceline.common.engine import engine
from paceline.common.operation import DEFAULTS, Options

__all__ = ["Auto", "Codec", "Codecs", "check", "codec_of"]


class SupportsCompress(Protocol):
    """What `Compressor` declares; a class with these methods need not be derived from it."""

    def compress(self, tensor: Any, /) -> tuple[Any, Any]:
        """Returns the compressed tensor and the context for `decompress`."""

    def decompress(self, tensor: Any, ctx: Any, /) -> Any:
        """Returns the tensor, up to the loss of the compression."""


class Compressor:
    """Compresses a tensor before an operation and decompresses the result. Subclass it for an algorithm of your own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the compressed tensor and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor, up to the loss of the compression."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor itself."""
        return tensor


@dataclasses.dataclass(frozen=True)
class Codec:
    """How tensors are coded. `text` is as in PACELINE_COMPRESSION: a codec's setting, or rules in JSON."""

    text: str


@dataclasses.dataclass(frozen=True)
class Auto(Codec):
    """A codec for each size of tensor, chosen by measurement when the optimizer is made. See `auto`."""

    text: str = "none"  # of tensors that are not measured
    candidates: tuple[str, ...] = ()


def _setting(name: str, *values: Any, lossless: str | None = None, **named: Any) -> Codec:
    """A codec's setting, as core/codec reads it. Arguments that are None have its defaults."""
    given = [_text(v) for v in values if v is not None]
    given += [f"{k}={_text(v)}" for k, v in named.items() if v is not None]
    text = f"{name}:{','.join(given)}" if given else name
    return Codec(text if lossless is None else f"{text}+{lossless}")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return repr(value) if isinstance(value, float) else str(value)


# What `compression=` takes: a Compressor, a codec of the engine, or a codec's setting.
CompressionArgument = SupportsCompress | Codec | str


class Codecs:
    """Makes codecs. All have `lossless`, "s2" or "zstd", which also compresses messages without loss if that pays.

    feedback: whether each rank and the server keep a residual, what was not sent, and add it to the name's next tensor;
    None for the codec's default. block: elements that share a scale.
    """

    @staticmethod
    def codec(setting: str) -> Codec:
        """Any codec by its setting, such as "int8:block=1024+zstd"."""
        return Codec(setting)

    @staticmethod
    def bf16(lossless: str | None = None) -> Codec:
        """bfloat16: the range of float32 with 8 bits of mantissa."""
        return _setting("bf16", lossless=lossless)

    @staticmethod
    def float16(feedback: bool | None = None, lossless: str | None = None) -> Codec:
        """float16 within the engine: unlike with `fp16`, the servers sum in float32."""
        return _setting("fp16", feedback=feedback, lossless=lossless)

    @staticmethod
    def int8(block: int | None = None, feedback: bool | None = None, lossless: str | None = None) -> Codec:
        """255 equidistant values for each block, rounded stochastically: unbiased."""
        return _setting("int8", block=block, feedback=feedback, lossless=lossless)

    @staticmethod
    def int4(block: int | None = None, feedback: bool | None = None, lossless: str | None = None) -> Codec:
        """15 equidistant values for each block, rounded stochastically: unbiased."""
        return _setting("int4", block=block, feedback=feedback, lossless=lossless)

    @staticmethod
    def qsgd(
        levels: int | None = None,
        block: int | None = None,
        coding: str | None = None,
        feedback: bool | None = None,
        lossless: str | None = None,
    ) -> Codec:
        """QSGD: multiples of a block's norm over `levels`. coding: "packed" or "elias"."""
        return _setting("qsgd", levels=levels, block=block, coding=coding, feedback=feedback, lossless=lossless)

    @staticmethod
    def terngrad(
        clip: float | None = None, block: int | None = None, feedback: bool | None = None, lossless: str | None = None
    ) -> Codec:
        """TernGrad: -s, 0 or s, after clipping to `clip` standard deviations from 0 (0: none)."""
        return _setting("terngrad", clip=clip, block=block, feedback=feedback, lossless=lossless)

    @staticmethod
    def natural(
        levels: int | None = None, block: int | None = None, feedback: bool | None = None, lossless: str | None = None
    ) -> Codec:
        """Natural dithering: powers of two, rounded stochastically."""
        return _setting("natural", levels=levels, block=block, feedback=feedback, lossless=lossless)

    @staticmethod
    def onebit(block: int | None = None, feedback: bool | None = None, lossless: str | None = None) -> Codec:
        """1-bit SGD: signs and a scale for each block, with a residual."""
        return _setting("onebit", block=block, feedback=feedback, lossless=lossless)

    @staticmethod
    def topk(
        share: float | None = None,
        count: int | None = None,
        warmup: int | None = None,
        feedback: bool | None = None,
        lossless: str | None = None,
    ) -> Codec:
        """The elements of the greatest magnitude, exactly: a share (0.01) or count of each partition, with a residual.

        warmup: iterations in which the share falls from a quarter to the given one.
        """
        return _setting("topk", share, count=count, warmup=warmup, feedback=feedback, lossless=lossless)

    @staticmethod
    def randomk(
        share: float | None = None,
        count: int | None = None,
        warmup: int | None = None,
        feedback: bool | None = None,
        lossless: str | None = None,
    ) -> Codec:
        """A random share or count of each partition, with a residual."""
        return _setting("randomk", share, count=count, warmup=warmup, feedback=feedback, lossless=lossless)

    @staticmethod
    def threshold(threshold: float, feedback: bool | None = None, lossless: str | None = None) -> Codec:
        """The elements of at least this magnitude, with a residual."""
        return _setting("threshold", float(threshold), feedback=feedback, lossless=lossless)

    @staticmethod
    def dgc(
        share: float | None = None,
        count: int | None = None,
        momentum: float | None = None,
        warmup: int | None = None,
        lossless: str | None = None,
    ) -> Codec:
        """Deep Gradient Compression: top-k of accumulated momentum, which replaces the optimizer's."""
        return _setting("dgc", share, count=count, momentum=momentum, warmup=warmup, lossless=lossless)

    @staticmethod
    def policy(rules: Sequence[dict[str, Any]] | str | os.PathLike[str]) -> Codec:
        """Codecs by tensor: rules, or the path of a JSON file with rules.

        A rule is {"codec": setting} with any of "names" (a pattern or several), "min_bytes", "max_bytes" and "dtypes".
        A tensor has the codec of the first rule that matches it, and is not coded if none does.
        """
        if isinstance(rules, str | os.PathLike):
            with open(rules) as file:
                return Codec(file.read())
        rules = [{**rule, "codec": getattr(rule.get("codec"), "text", rule.get("codec"))} for rule in rules]
        return Codec(json.dumps(rules))

    @staticmethod
    def auto(allow_residual: bool = False, candidates: Sequence[str | Codec] = ()) -> Codec:
        """The codec with the shortest exchange for each size of tensor, as measured over the job's own links.

        Each rank measures when it makes the optimizer, and waits for the others there.

        candidates: the settings or codecs to choose from. By default plain float32, fp16 and int8, which train as well
        in all but rare cases; with allow_residual also onebit and topk:0.01.
        """
        names = [c.text if isinstance(c, Codec) else c for c in candidates]
        names = names or ["fp16", "int8"] + (["onebit", "topk:0.01"] if allow_residual else [])
        return Auto(candidates=("none", *(n for n in names if n != "none")))


def codec_of(compression: Any) -> Codec | None:
    """The codec that an argument names: a Codec, a setting, or a path; None for a Compressor, which works on tensors.

    Raises ValueError for anything else. `check` checks the text.
    """
    if isinstance(compression, Codec):
        return compression
    if compression == "auto":
        return Codecs.auto()
    if isinstance(compression, str):
        return Codec(compression or "none")
    if isinstance(name := getattr(compression, "__name__", None), str) and getattr(Codecs, name, None) is compression:
        raise ValueError(f"compression=hvd.Compression.{name}: codecs are called, hvd.Compression.{name}(...)")
    if hasattr(compression, "compress") and hasattr(compression, "decompress"):
        return None
    raise ValueError(
        f"compression={compression!r}: give hvd.Compression.fp16, hvd.Compression.topk(0.01) or another, "
        "a setting such as 'topk:0.01', or a class with compress and decompress"
    )


def split(compression: CompressionArgument) -> tuple[Any, Options]:
    """An operation's `compression`: a Compressor for its tensors, and options with the engine's codec.

    Raises ValueError for anything else.
    """
    codec = codec_of(compression)
    if isinstance(codec, Auto):
        raise ValueError("Compression.auto() is DistributedOptimizer's: it measures with the gradients' sizes")
    return (compression, DEFAULTS) if codec is None else (NoneCompressor, Options(codec=codec.text))


def check(codec: Codec) -> None:
    """Raises ValueError, which says what is allowed, for a text that names no codec."""
    for text in (codec.text, *getattr(codec, "candidates", ())):
        engine.check_codec(text)
