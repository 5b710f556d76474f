"""torch.distributed's reduction operators in terms of the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from paceline.common import operators

_OPERATORS = {
    ReduceOp.SUM: operators.Sum,
    ReduceOp.AVG: operators.Average,
    ReduceOp.PRODUCT: operators.Product,
    ReduceOp.MIN: operators.Min,
    ReduceOp.MAX: operators.Max,
}
# Of truth values, as NCCL has them: a sum says whether any is true, a product whether all are.
_OF_BOOLS = {
    ReduceOp.SUM: operators.Max,
    ReduceOp.PRODUCT: operators.Min,
    ReduceOp.MIN: operators.Min,
    ReduceOp.MAX: operators.Max,
    ReduceOp.BAND: operators.Min,
    ReduceOp.BOR: operators.Max,
}
BITWISE = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


class Reduction(NamedTuple):
    """How the engine reduces: its operator, and the factor of each rank's tensor. bitwise: the engine gathers only."""

    op: int
    prescale: float = 1.0
    bitwise: ReduceOp.RedOpType | None = None


def reduction_of(op: ReduceOp, tensor: torch.Tensor) -> Reduction:
    """The reduction of tensors like this one. Raises ValueError for an operator that is not defined for their type."""
    which = op.op if isinstance(op, ReduceOp) else op
    if tensor.dtype is torch.bool and which in _OF_BOOLS:
        return Reduction(_OF_BOOLS[which])
    if tensor.dtype is torch.bool and which == ReduceOp.AVG:
        raise ValueError("ReduceOp.AVG is not defined for truth values")
    if which in BITWISE:
        if tensor.is_floating_point() or tensor.is_complex():
            raise ValueError(f"Cannot use ReduceOp.{which.name} with non-integral dtype: {tensor.dtype}")
        return Reduction(operators.Sum, bitwise=which)
    if which == ReduceOp.PREMUL_SUM:
        pickled: Any = op.__getstate__()  # also before PyTorch 2.14, where it has no attribute for its factor
        factor = pickled[1]
        return Reduction(operators.Sum, float(factor.item() if isinstance(factor, torch.Tensor) else factor))
    if which not in _OPERATORS:
        raise ValueError(f"{op} is no operator of reductions")
    if tensor.is_complex() and which not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"ReduceOp.{which.name} is not defined for complex numbers")
    return Reduction(_OPERATORS[which])


def reductions_of(op: ReduceOp, tensors: Sequence[torch.Tensor]) -> list[Reduction]:
    """The reduction of each of several tensors, whose types may differ: all are bitwise, or none."""
    hows = [reduction_of(op, tensor) for tensor in tensors]
    bitwise = next((how for how in hows if how.bitwise is not None), None)
    return hows if bitwise is None else [bitwise] * len(hows)  # of truth values beside integers, too, it is the same
