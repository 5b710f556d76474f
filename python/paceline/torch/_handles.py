"""Handles: what is in flight, and how its results come back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paceline._abi import Op
from paceline._engine import engine
from paceline.common.exceptions import HorovodInternalError


class _Pending(NamedTuple):
    """An operation, or a group of them, in flight."""

    round: int
    handles: Sequence[int]
    finish: Callable[[], Any]  # keeps the tensors alive that the engine works on


_numbers = itertools.count()
_pending: dict[int, _Pending] = {}


def start(ops: Sequence[Op], finish: Callable[[Sequence[int]], Any]) -> int:
    """Submits the operations as one group and returns its handle.

    finish gets the engine's handles once all are done and makes the result of `synchronize`. It must hold every tensor
    whose memory the operations use.
    """
    handles = engine.submit(ops)
    return watch(handles, lambda: finish(handles))


def watch(handles: Sequence[int], finish: Callable[[], Any]) -> int:
    """A handle for operations that the engine has already started."""
    number = next(_numbers)
    _pending[number] = _Pending(engine.round, handles, finish)
    return number


def poll(handle: int) -> bool:
    """Whether the operation is over, so that `synchronize` will not wait.

    Raises ValueError for a handle that was never given out or is synchronized already.
    """
    pending = _pending.get(handle)
    if pending is None:
        raise ValueError(f"handle {handle} was never given out, or has been synchronized already")
    return pending.round != engine.round or all(engine.ended(h) for h in pending.handles)


def synchronize(handle: int) -> Any:
    """Waits until the operation is over and returns its output.

    That is a tensor, or a tuple of tensors for a grouped operation, or (tensor, received_splits) for alltoall; None
    for a handle that has been synchronized already, as in Horovod. Raises HorovodInternalError when the operation
    failed. Ctrl-C breaks off the wait, not the operation.
    """
    pending = _pending.get(handle)
    if pending is None:
        return None
    if pending.round != engine.round or not engine.is_initialized():
        del _pending[handle]
        raise HorovodInternalError("the operation was in flight when shutdown() was called")
    failure = engine.wait(pending.handles)
    del _pending[handle]
    try:
        if failure is not None:
            raise failure
        return pending.finish()
    finally:
        engine.release(pending.handles)
