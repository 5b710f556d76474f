"""The names of backends: those that are ours, and those of a group."""

from __future__ import annotations

from torch.distributed.distributed_c10d import Backend, BackendConfig

from paceline.torch._memory import accelerator

NAME = "paceline"
# The names under which a script gets the backend.
ours: set[str] = set()
# Before PyTorch 2.14 nothing looks a backend up by its name, nor can one be written in Python (older.py).
OLDER = not hasattr(Backend, "_ensure_backend_registered")


def device_types() -> list[str]:
    """The types of the devices whose tensors the backend takes."""
    return list(dict.fromkeys(filter(None, ("cpu", "cuda", accelerator()))))


def of_group(backend: str) -> set[str]:
    """The backends of a group: "gloo" has one, "cpu:gloo,cuda:nccl" two."""
    return set(BackendConfig(Backend(backend)).get_device_backend_map().values())


def is_ours(backend: str) -> bool:
    """Whether our backend is one of those of a group. Before PyTorch 2.14 it is the only one."""
    backends = of_group(backend)
    return backends <= ours if OLDER else not backends.isdisjoint(ours)
