"""What the optimizers of all frameworks take alike: checks of their arguments."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from paceline.common import compression as codecs
from paceline.common.codec_tuning import check_stays
from paceline.common.compression import Codec, NoneCompressor, SupportsCompress
from paceline.common.engine import engine
from paceline.common.operators import Adasum, Average, Sum
from paceline.common.process_sets import ProcessSet, check_process_set
from paceline.common.significance import Significance
from paceline.common.sync import Model, check, model_of


class Asked(NamedTuple):
    """What an optimizer's arguments ask for."""

    model: Model
    compressor: SupportsCompress  # of tensors, before the engine has them
    codec: Codec | None  # of the engine; None for the job's


def asked_of(
    compression: Any,
    process_set: ProcessSet,
    sync: Any,
    gate: object,
    pull_gate: object = None,
    *,
    op: int = Average,
    predivide: float = 1.0,
    measures: bool = True,
    before_init: bool = False,
) -> Asked:
    """What an optimizer's arguments ask for. Raises ValueError for those that cannot be, or do not go together.

    measures: whether it has the codec measured where PACELINE_COMPRESSION is auto. before_init: whether it may be made
    before `init()`.
    """
    check_process_set(process_set)
    if not predivide > 0:
        raise ValueError(f"gradient_predivide_factor={predivide}: a number above 0")
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor works with op=hvd.Average only")
    if gate is not None and (not isinstance(gate, Significance) or op not in (Average, Sum)):
        raise ValueError(f"gate={gate!r}: give paceline.Significance(...), with op=Average or Sum")
    Significance.check("pull_gate", pull_gate)
    codec = codecs.codec_of(compression)
    plain = compression is NoneCompressor and op != Adasum  # whose steps are never coded
    if measures and plain and engine.is_initialized() and engine.setting("compression") == "auto":
        codec = codecs.codec_of("auto")
    if codec is not None:
        check_stays(codec)
        codecs.check(codec)
        if op == Adasum:
            raise ValueError(f"compression={codec.text!r}: Adasum combines whole steps, which travel plain")
        compression = NoneCompressor
    model = model_of(sync)
    if model.ahead and (op not in (Average, Sum) or predivide != 1.0 or compression is not NoneCompressor):
        raise ValueError(
            f"sync={model.setting}: ranks exchange what their steps did, so that only op=Average or Sum, "
            "gradient_predivide_factor=1, Compression.none and the engine's codecs are possible"
        )
    if pull_gate is not None and not model.ahead:
        raise ValueError(
            f"pull_gate={pull_gate!r} with sync={model.setting}: each step needs its sums; give a model under which "
            "the servers hold the parameters, such as paceline.SSP(3)"
        )
    if engine.is_initialized() or not before_init:
        check(model, process_set.size(), accumulate=model.ahead)
    return Asked(model, cast(SupportsCompress, compression), codec)


def check_passes(given: object) -> None:
    """Raises ValueError unless it can be backward_passes_per_step."""
    if not isinstance(given, numbers.Integral) or given < 1:
        raise ValueError(f"backward_passes_per_step={given!r}: at least 1, as an int")


def warn_of_momentum(codec: Codec | None, has_momentum: Callable[[], bool]) -> None:
    """Warns the caller of DistributedOptimizer where the codec has momentum, and the optimizer has it too."""
    rules = engine.codec_info(codec.text) if codec is not None and has_momentum() else []
    if rules and all(r["momentum"] for r in rules):
        name = rules[0]["setting"].partition(":")[0]
        warnings.warn(
            f"{name}'s momentum takes the place of the optimizer's, which has one too: give it momentum=0", stacklevel=3
        )
