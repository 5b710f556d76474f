"""An optimizer's parameters: the names by which ranks match them, and gradients of zeros."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from paceline.torch._memory import sparse


def parameter_names(
    param_groups: Sequence[dict[str, Any]], named_parameters: Iterable[Any] | None
) -> dict[torch.Tensor, str]:
    """The name of each parameter. Raises ValueError if the given names do not match the optimizer's parameters."""
    params = [p for group in param_groups for p in group["params"]]
    if named_parameters is None:
        return {p: f"noname.{i}.{j}" for i, group in enumerate(param_groups) for j, p in enumerate(group["params"])}
    named = list(named_parameters)
    if not all(isinstance(entry, tuple) and len(entry) == 2 for entry in named):
        raise ValueError("named_parameters must be a sequence of (name, parameter), such as model.named_parameters()")
    duplicates = sorted(name for name, times in collections.Counter(name for name, _ in named).items() if times > 1)
    if duplicates:
        raise ValueError(
            f"parameter names in named_parameters must be unique, these stand there twice: {', '.join(duplicates)}"
        )
    names = {p: name for name, p in named}
    missing = [
        f"group {i}, place {j}, shape {tuple(p.shape)}"
        for i, group in enumerate(param_groups)
        for j, p in enumerate(group["params"])
        if p not in names
    ]
    if missing:
        raise ValueError(
            f"named_parameters lacks {len(missing)} of the optimizer's {len(params)} parameters: {'; '.join(missing)}"
        )
    return names


def byte_sizes(param_groups: Sequence[dict[str, Any]]) -> list[int]:
    """The bytes of each parameter."""
    return [p.numel() * p.element_size() for group in param_groups for p in group["params"]]


def empty_sparse(p: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without elements, of whole rows, as embeddings have."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=p.device)
    return sparse(indices, p.new_empty(0, *p.shape[1:]), p.shape)
