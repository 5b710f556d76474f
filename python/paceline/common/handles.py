"""Handles of operations in flight, and their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paceline.common import abi
from paceline.common.abi import Op
from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError
from paceline.common.operation import Repeat, ended_well


class _Pending(NamedTuple):
    """An operation, or a group of them, in flight."""

    round: int
    handles: Sequence[int]
    finish: Callable[[], Any]  # makes the result; keeps the engine's tensors alive


_numbers = itertools.count()
_pending: dict[int, _Pending | Repeat] = {}
_dropped: set[int] = set()  # that nobody had synchronized at the last shutdown


def start(ops: Sequence[Op], finish: Callable[[Sequence[int]], Any], at_once: bool = False) -> int:
    """Submits the operations as one group and returns its handle.

    finish: called with the engine's handles when all are done; returns the result of `synchronize`. It must hold every
    tensor whose memory the operations use. at_once: the caller waits next.
    """
    ops[-1].at_once = at_once
    handles = abi.no_handles(len(ops))

    def result() -> Any:
        for op in ops:
            ended_well(op)
        return finish(handles)

    return _submit(ops, _Pending(engine.round, handles, result))


def start_again(repeat: Repeat, input: int, output: int, memory: Any, result: Any, at_once: bool) -> int:
    """Submits an operation that repeats and returns its handle. Arguments as of `Repeat.begin`."""
    repeat.begin(input, output, memory, result, at_once)
    return _submit(repeat.ops, repeat)


def watch(handles: Sequence[int], finish: Callable[[], Any]) -> int:
    """Returns a handle for operations that the engine has already started."""
    number = next(_numbers)
    _pending[number] = _Pending(engine.round, handles, finish)
    return number


def _submit(ops: Sequence[Op], pending: _Pending | Repeat) -> int:
    number = next(_numbers)
    _pending[number] = pending  # before the engine has them: then Ctrl-C may come
    try:
        engine.submit(ops, pending.handles)
    except BaseException:
        if pending.handles[0] == abi.NO_HANDLE:
            del _pending[number]
        raise
    return number


def poll(handle: int) -> bool:
    """Whether the operation has ended, so that `synchronize` will not wait.

    Raises ValueError for a handle that does not exist or was synchronized already.
    """
    pending = _pending.get(handle)
    if pending is None and handle in _dropped:
        return True
    if pending is None:
        raise ValueError(f"handle {handle} was never given out, or has been synchronized already")
    return pending.round != engine.round or all(engine.ended(h) for h in pending.handles)


def synchronize(handle: int) -> Any:
    """Waits until the operation has ended and returns its output.

    The output is a tensor, for a grouped operation a tuple of tensors, for alltoall (tensor, received_splits), and None
    for a handle that was synchronized already, as in Horovod. Raises HorovodInternalError if the operation failed.
    Ctrl-C ends the wait, not the operation.
    """
    pending = _pending.get(handle)
    if pending is None and handle not in _dropped:
        return None
    _dropped.discard(handle)
    if pending is None or not engine.runs(pending.round):
        _pending.pop(handle, None)
        raise HorovodInternalError("the operation was in flight when shutdown() was called")
    handles = pending.handles  # a Repeat has others when it is started again
    failure = engine.wait(handles)
    if _pending.pop(handle, None) is None:  # another thread has called shutdown()
        raise failure or HorovodInternalError("the operation was not synchronized when shutdown() was called")
    try:
        if failure is not None:
            raise failure
        return pending.finish()
    finally:
        engine.release(handles)


def _drop() -> None:
    """Lets go of what nobody has synchronized, and of its tensors. Only their numbers stay, until the next shutdown."""
    _dropped.clear()
    while _pending:
        number, pending = _pending.popitem()
        engine.release(pending.handles)
        _dropped.add(number)


engine.at_shutdown(_drop)
