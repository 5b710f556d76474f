"""How PyTorch gets to know the backend: under its own name, and in the place of others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Backend

from paceline.torch.distributed import names, versions, worlds

# Backends whose place it can take: those for tensors in host memory.
_REPLACEABLE = ("gloo",)


@versions.known()
def register() -> None:
    """Registers the backend as "paceline". PyTorch calls it when a script names the backend for the first time.

    Before PyTorch 2.14 the import of paceline.torch.distributed does. Raises ImportError, with what is supported, under
    a PyTorch where neither backends nor the works of groups can be written in Python.
    """
    _register(names.NAME)
    if names.OLDER:
        from paceline.torch.distributed import older

        older.install()


@versions.known()
def take_over(given: str) -> None:
    """Registers the backend under other names, separated by commas: "gloo". Raises ValueError for other names."""
    for name in filter(None, (text.strip().lower() for text in given.split(","))):
        if name not in _REPLACEABLE:
            raise ValueError(f"PACELINE_TAKEOVER={given!r}: allowed are {', '.join(_REPLACEABLE)}, separated by commas")
        if names.OLDER:
            names.ours.add(name)
        else:
            _register(name)
        worlds.install()


def _register(name: str) -> None:
    if not names.OLDER:
        getattr(torch._C._distributed_c10d.Backend, "allreduce")  # noqa: B009, which backends written in Python have
    # Of a custom type: to backends of Gloo's type PyTorch talks as to its own class.
    Backend.register_backend(name, _maker(name), extended_api=True, devices=names.device_types())
    names.ours.add(name)


def _maker(name: str) -> Callable[[Any, Any], Any]:
    def make(options: Any, backend_options: Any) -> Any:
        with versions.known():
            from paceline.torch.distributed.backend import PacelineBackend

        timeout = options.timeout
        if not isinstance(timeout, timedelta):
            timeout = timedelta(seconds=timeout)
        ranks = list(options.global_ranks_in_group)
        return PacelineBackend.join(
            name, options.store, options.group_rank, options.group_size, ranks, options.group_id, timeout
        )

    return make
