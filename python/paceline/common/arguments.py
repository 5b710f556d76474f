"""Checks of arguments that several frameworks have."""

from __future__ import annotations

import numbers


def check_passes(given: object) -> None:
    """Raises ValueError unless it can be backward_passes_per_step."""
    if not isinstance(given, numbers.Integral) or given < 1:
        raise ValueError(f"backward_passes_per_step={given!r}: at least 1, as an int")
