"""Significance gates, for pushes and pulls: `DistributedOptimizer(gate=..., pull_gate=...)`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Significance:
    """Withholds a change of a tensor that is small relative to the tensor, as Gaia's significance filter does.

    Withheld changes add up on the rank until |sum| / |weights| (L2, by tensor) is at least threshold /
    iterations ** decay. Meanwhile the rank sends empty pushes, which count, so that no rank waits. The changes are part
    of `paceline.compression_state()`. When all ranks have joined, models that let ranks run ahead drop them.
    As `pull_gate` the servers apply the rule, by partition: below the threshold they send no delta, and the rank
    continues with the value that it has.
    decay: 0.5 is Gaia's rule, 0 keeps the threshold constant.
    """

    threshold: float
    decay: float = 0.0

    def __post_init__(self) -> None:
        _check_number("threshold", self.threshold)
        _check_number("decay", self.decay)

    @classmethod
    def check(cls, argument: str, given: object) -> None:
        """Raises ValueError, which names the argument, unless it is a Significance or None."""
        if given is not None and not isinstance(given, cls):
            raise ValueError(f"{argument}={given!r}: give paceline.Significance(...)")

    def at(self, iteration: int) -> float:
        """The threshold in an iteration, counted from 1."""
        return self.threshold / iteration**self.decay


def _check_number(argument: str, given: Any) -> None:
    try:
        fits = math.isfinite(given) and given >= 0
    except TypeError:
        fits = False
    except OverflowError:
        raise ValueError(f"{argument} is beyond the numbers of a float: give a number of at least 0") from None
    if not fits:
        raise ValueError(f"{argument}={given!r}: a number of at least 0")
