"""What PyTorch does not ask backends written in Python: their works, and groups without this rank.

PyTorch wraps the work of a backend written in Python in one that only waits: `is_completed()`, `exception()`,
`result()` and the source of a receive from anybody would be lost. The methods of ProcessGroup therefore look for the
work that the backend has just started. PyTorch's own callers in C++, such as DistributedDataParallel, use the wrapper.
A reducer that is given a work keeps the part of it that is in C++, and finds no future when the part in Python is gone.
A rank that is not in a group which is split off would crash: PyTorch expects a backend there too.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch._C._distributed_c10d import ProcessGroup, Reducer

from paceline.torch.distributed.work import PacelineWork

_METHODS = [
    "allgather",
    "all_gather_single",
    "all_gather_single_coalesced",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "all_to_all_single",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
    "scatter",
    "send",
]


def unwrapped(backend: Any) -> Any:
    """The backend that TORCH_DISTRIBUTED_DEBUG=DETAIL has wrapped in PyTorch's checks."""
    return getattr(backend, "wrapped_pg", backend)


class _Calls(threading.local):
    """The works that a thread's calls have started, of which a signal's handler makes one within another."""

    def __init__(self) -> None:
        self.works: list[PacelineWork | None] = []


_calls = _Calls()


def started(work: PacelineWork) -> PacelineWork:
    """Notes the work that this thread's call has started."""
    if _calls.works:
        _calls.works[-1] = work
    return work


@functools.cache
def install(backend: type) -> None:
    """Has the methods of ProcessGroup return the works of such backends, and split off groups of other ranks."""
    if not issubclass(backend, ProcessGroup):  # before PyTorch 2.14
        for name in _METHODS:
            if (method := getattr(ProcessGroup, name, None)) is not None:
                setattr(ProcessGroup, name, _returning(method))
        setattr(ProcessGroup, "split_group", _splitting(ProcessGroup.split_group, backend))  # noqa: B010
    setattr(Reducer, "_set_forward_pass_work_handle", _keeping(Reducer._set_forward_pass_work_handle))  # noqa: B010


# The works that tell reducers how many ranks have not joined.
_forward_works: weakref.WeakKeyDictionary[Reducer, Any] = weakref.WeakKeyDictionary()


def _keeping(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Reducer, work: Any, use_static_world_size: bool) -> None:
        _forward_works[self] = work
        method(self, work, use_static_world_size)

    return call


def _returning(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        works = _calls.works
        works.append(None)
        try:
            work = method(self, *args, **kwargs)
        finally:
            ours = works.pop()
        return work if ours is None else ours

    return call


def _splitting(method: Callable[..., Any], backend: type) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, new_ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        all_ours = all(isinstance(unwrapped(self._get_backend(device)), backend) for device in self._device_types)
        if all_ours and self.rank() not in new_ranks:
            return None
        return method(self, new_ranks, *args, **kwargs)

    return call
