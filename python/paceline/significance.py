"""Sending only what matters, both ways: `DistributedOptimizer(gate=..., pull_gate=...)`."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Significance:
    """Holds back what would change a tensor by less than a share of it, as Gaia's significance filter does.

    What is held back adds up on the rank until it counts: until |sum| / |weights| (L2, by tensor) is threshold /
    iterations ** decay or more. In its place the rank sends an empty push that counts, so that nobody waits for it.
    A rank's `paceline.compression_state()` has what it holds back. When all ranks have joined, models that let ranks
    run ahead drop it.
    As `pull_gate` the same rule is the servers', by partition: of what is not significant a rank is told nothing, and
    goes on with what it has.
    decay: 0.5 is Gaia's rule, 0 keeps the threshold.
    """

    threshold: float
    decay: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise ValueError(f"threshold={self.threshold}: a number of at least 0")
        if not (math.isfinite(self.decay) and self.decay >= 0):
            raise ValueError(f"decay={self.decay}: a number of at least 0")

    @classmethod
    def check(cls, argument: str, given: object) -> None:
        """Raises ValueError, which names the argument, for what is neither a Significance nor None."""
        if given is not None and not isinstance(given, cls):
            raise ValueError(f"{argument}={given!r}: give paceline.Significance(...)")

    def at(self, iteration: int) -> float:
        """The threshold in an iteration, counted from 1."""
        return self.threshold / iteration**self.decay
