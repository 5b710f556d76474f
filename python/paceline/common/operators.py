"""Reduction operators, with Horovod's numbers."""

from __future__ import annotations

import warnings

Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


def operator_of(op: int | None, average: bool | None) -> int:
    """The operator that `op` or the deprecated `average` names: Average if both are None.

    Raises ValueError if both are given, or if `op` is no operator.
    """
    if op is None and average is None:
        return Average
    if op is None:
        warnings.warn(
            "Parameter `average` has been replaced with `op`: use op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    if average is not None:
        raise ValueError("op replaces average: give only one of them")
    if op not in range(len(_NAMES)):
        raise ValueError(f"op={op!r} is no reduction operator: use one of hvd.{', hvd.'.join(_NAMES)}")
    return op
