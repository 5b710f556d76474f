"""What a rank holds back under `DistributedOptimizer(gate=...)`."""

from __future__ import annotations

import torch

from paceline.significance import Significance


class Gate:
    """Adds up what is not significant enough to be sent, for each parameter."""

    def __init__(self, rule: Significance) -> None:
        self._rule = rule
        self._iteration = 1
        self._held: dict[torch.Tensor, torch.Tensor] = {}

    def offer(
        self, p: torch.Tensor, contribution: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """What to send for a parameter: the contribution with all that was held back, or None for nothing.

        weights: what to measure it by, if not the parameter as it is. contribution is left as it is. What is not
        finite is always sent.
        """
        held = self._held.pop(p, None)
        total = contribution if held is None else held.add_(contribution)
        if _norm(total) < self._rule.at(self._iteration) * _norm((p if weights is None else weights).detach()):
            self._held[p] = total.clone() if total is contribution else total
            return None
        return total

    def held(self, p: torch.Tensor) -> torch.Tensor | None:
        """What is held back of a parameter."""
        return self._held.get(p)

    def clock(self) -> None:
        """Ends an iteration: the threshold decays."""
        self._iteration += 1

    def clear(self) -> None:
        """Forgets what is held back."""
        self._held.clear()


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """The L2 norm; of float16 in float32, or that of many elements is infinite, and nothing counts beside it."""
    return torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
