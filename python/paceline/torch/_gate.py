"""The changes that a rank withholds under `DistributedOptimizer(gate=...)`."""

from __future__ import annotations

import io
from collections.abc import Mapping

import torch

from paceline.common import gate
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.common.significance import Significance


class _Arrays:
    """What gates do with tensors."""

    def norm(self, array: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(array.dtype, torch.float32)
        return torch.linalg.vector_norm(array.detach(), dtype=dtype)

    def copy(self, array: torch.Tensor) -> torch.Tensor:
        return array.clone()

    def add(self, total: torch.Tensor, contribution: torch.Tensor) -> torch.Tensor:
        return total.add_(contribution)

    def restored(self, saved: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
        return saved.to(like) if saved.shape == like.shape else None

    def dump(self, state: gate.State) -> bytes:
        buffer = io.BytesIO()
        torch.save({key: (i, None if change is None else change.cpu()) for key, (i, change) in state.items()}, buffer)
        return buffer.getvalue()

    def load(self, data: bytes) -> gate.State:
        loaded: gate.State = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        for key, (iteration, change) in loaded.items():
            if change is not None and type(change) is not torch.Tensor:
                raise TypeError
            if change is not None:
                loaded[key] = iteration, change.detach().contiguous()  # own memory, no hooks
        return loaded


_gates = gate.Gates("torch.gates", _Arrays())


class Gate(gate.Gate):
    """A gate of tensors."""

    def __init__(
        self,
        rule: Significance,
        names: Mapping[torch.Tensor, str] | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(_gates, rule, {} if names is None else names, process_set)
