"""Tensors in memory that the servers of this host have mapped, so that sums are made in place."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.common.engine import engine
from paceline.torch._memory import is_direct

_ALIGNED = 64  # bytes: a cache line


def zeros_in_arena(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros on the CPU in this process's arena, after init(): an allreduce in place there is not copied to servers.

    It is an ordinary tensor where there is no arena: without shared memory, or where the arena is full.
    """
    count = torch.Size(size).numel()
    memory = engine.arena(count * dtype.itemsize)
    if memory is None:
        return torch.zeros(size, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype).view(size)


def gradients_in_arena(params: Iterable[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """A place in the arena for the gradient of each of these parameters that the engine can use directly."""
    places, total = [], 0
    for p in params:
        if p.numel() > 0 and is_direct(p):
            places.append((p, total))
            total += -(-p.nbytes // _ALIGNED) * _ALIGNED
    memory = engine.arena(total) if total else None
    if memory is None:
        return {}
    return {
        p: torch.frombuffer(memory, dtype=p.dtype, count=p.numel(), offset=offset).view_as(p) for p, offset in places
    }
