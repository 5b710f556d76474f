"""What a program chains to the futures of works: callbacks, which may begin operations and wait for them.

Operations of a group match by the order of their calls, and every rank's works end in an order of their own. So that
what callbacks begin matches too,

1. the callbacks of a group's works run one at a time, in the order in which the program chained them (`then`), on a
   thread beside the program's: a lane. So do those of `collect_all` of their futures;
2. what a lane begins is a sequence of its own, beside what the program itself begins meanwhile;
3. what a callback chains in its turn has the next lane, so that it may wait for that.

By induction the order within each sequence is that of the program, on all ranks.

The library's thread, which completes futures, meets no lock here: the program's thread may have it in a signal's
handler which waits for the library.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from paceline.common.engine import engine

Devices = list[int | str | torch.device]

_IDLE_S = 10.0  # after which a lane's thread ends
_NAME = "paceline futures"
_LOOK_S = 0.005  # how often the end of callbacks is looked for at the process's end
_DEEPEST = 8  # lanes that one has begun in another: callbacks that chain themselves for ever stay in the last one
_then: Any = torch._C.Future.then
_add_done_callback: Any = torch._C.Future.add_done_callback

_lanes: dict[tuple[str, Lane | None], Lane] = {}
# Of the futures that `then` has returned: their groups, and the devices whose streams they mind.
_chained: weakref.WeakKeyDictionary[Any, tuple[str, Devices]] = weakref.WeakKeyDictionary()


class _Here(threading.local):
    lane: Lane | None = None  # whose callback this thread runs


_here = _Here()


def lane_name() -> str:
    """The name of the lane that the caller is in, which is the same on all ranks; empty outside of callbacks."""
    return "" if _here.lane is None else _here.lane.name


class Lane:
    """The callbacks of one group's works that one thread of the program, or one lane, has chained."""

    def __init__(self, group: str, within: Lane | None) -> None:
        self.name: str = f" after {group}{'' if within is None else within.name}"
        self.depth: int = 1 if within is None else within.depth + 1
        self._entries: deque[tuple[Any, Any]] = deque()  # futures, and those that are completed after them, in turn
        self._looks: queue.SimpleQueue[Any] = queue.SimpleQueue()  # an item for each look at the first entry
        self._has_thread = False  # which ends when it has had nothing to do for a while
        self._runs = threading.Lock()  # of one thread: there may be another for a moment
        self._calls = False

    def add(self, future: Any, turn: Any) -> None:
        """Has `turn` be completed when the future is, and all that came before."""
        try:
            self._entries.append((future, turn))
            if not self._has_thread:
                self._begin()
        finally:  # also after Ctrl-C: others come behind it
            _add_done_callback(future, self._looks.put)  # in C alone: PyTorch swallows Ctrl-C that comes in a callback

    def _begin(self) -> None:
        try:
            self._has_thread = True
            threading.Thread(target=self._run, name=_NAME).start()
        except BaseException:
            self._has_thread = False
            raise

    def works(self) -> bool:
        """Whether a callback runs, or is about to."""
        try:
            return (bool(self._entries) and self._entries[0][0].done()) or self._calls
        except IndexError:  # the lane has just taken the last entry
            return True

    def end(self) -> None:
        """Ends its thread."""
        if self._has_thread:
            self._looks.put(None)

    def _run(self) -> None:
        _here.lane = self
        with self._runs:
            while not self._idles():
                while self._entries and self._entries[0][0].done():
                    self._calls = True
                    self._entries.popleft()[1].set_result(None)
                    self._calls = False

    def _idles(self) -> bool:
        """Waits for a look. Returns whether the thread ends instead."""
        try:
            ends = self._looks.get(timeout=_IDLE_S) is None
        except queue.Empty:
            if not self._entries:
                self._has_thread = False
            return not self._entries  # one that has come meanwhile counts on this thread
        if ends:
            self._has_thread = False
        return ends


def _lane_of(group: str) -> Lane:
    within = _here.lane
    if within is not None and within.depth >= _DEEPEST:
        return within
    return _lanes.setdefault((group, within), Lane(group, within))


def _end_lanes() -> None:
    """Ends the threads of lanes at the process's end, before Python waits for them: others end first.

    Where an exception ends the process, they may wait for what comes no more: then their operations end with the job.
    """
    while others := [t for t in threading.enumerate() if _is_waited_for(t)]:
        others[0].join()
    while any(lane.works() for lane in list(_lanes.values())):
        if hasattr(sys, "last_value"):
            engine.leave_at_exit()
        time.sleep(_LOOK_S)
    for lane in list(_lanes.values()):
        lane.end()


def _is_waited_for(thread: threading.Thread) -> bool:
    return not thread.daemon and thread.name != _NAME and thread is not threading.main_thread()


def _chain(future: Any, group: str, devices: Devices, callback: Callable[[Any], Any]) -> Any:
    turn: Any = torch.futures.Future(devices=devices)
    child = _then(turn, lambda _: _called(callback, future, devices))
    _chained[child] = group, devices
    _lane_of(group).add(future, turn)
    return child


def _listen(future: Any, group: str, devices: Devices, callback: Callable[[Any], Any]) -> None:
    turn: Any = torch.futures.Future(devices=devices)
    _add_done_callback(turn, lambda _: _called(callback, future, devices))
    _lane_of(group).add(future, turn)


def _called(callback: Callable[[Any], Any], future: Any, devices: Devices) -> Any:
    """Calls it, in a stream that follows what is queued for the future's values."""
    if devices:
        with contextlib.suppress(Exception):  # of a future that has failed: the callback finds out
            future.wait()
    return callback(future)


@functools.cache
def install() -> None:
    """Has futures that `then` returns chain callbacks as the works' own do: PyTorch makes them, of its own class."""
    collect: Any = torch._C._collect_all

    @functools.wraps(_then)
    def then(self: Any, callback: Any) -> Any:
        known = _chained.get(self)
        return _then(self, callback) if known is None else _chain(self, *known, callback)

    @functools.wraps(_add_done_callback)
    def add_done_callback(self: Any, callback: Any) -> None:
        known = _chained.get(self)
        if known is None:
            _add_done_callback(self, callback)
        else:
            _listen(self, *known, callback)

    @functools.wraps(collect)
    def collect_all(futures: Any) -> Any:
        collected = collect(futures)
        known = next((known for f in futures if (known := _known(f)) is not None), None)
        if known is not None:
            _chained[collected] = known
        return collected

    exits: list[Any] = threading._threading_atexits  # type: ignore[attr-defined]
    exits.insert(0, _end_lanes)  # is called last: threads of pools have ended then
    os.register_at_fork(after_in_child=_lanes.clear)  # their threads are not there
    setattr(torch._C, "_collect_all", collect_all)  # noqa: B010
    setattr(torch._C.Future, "then", then)  # noqa: B010
    setattr(torch._C.Future, "add_done_callback", add_done_callback)  # noqa: B010


def _known(future: Any) -> tuple[str, Devices] | None:
    """The group and the devices of a future of ours."""
    return (future.group, future.devices) if isinstance(future, WorkFuture) else _chained.get(future)


class _Failed:
    """The value of a future without outputs. DistributedDataParallel looks for tensors in it, and gets the error."""

    def __init__(self, failure: BaseException) -> None:
        self.failure = failure

    def reraise(self) -> NoReturn:
        """Raises the error."""
        raise self.failure

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """PyTorch pickles a value to find its tensors; where it finds none, as in an exception, it crashes."""
        self.reraise()


class WorkFuture(torch.futures.Future):  # type: ignore[type-arg]
    """The future of a work of a group."""

    def __init__(self, group: str, devices: Devices) -> None:
        super().__init__()  # without devices: the outputs are there, and PyTorch would look into errors for tensors
        self.group, self.devices = group, devices

    def then(self, callback: Any) -> Any:
        """A future of what the callback returns, which gets this future on its lane."""
        return _chain(self, self.group, self.devices, callback)

    def add_done_callback(self, callback: Any) -> None:
        """Has the callback get this future on its lane."""
        _listen(self, self.group, self.devices, callback)

    def complete(self, outputs: Any, failure: BaseException | None) -> None:
        """Completes it."""
        if failure is None:
            self.set_result(outputs)
        else:
            self.fail(failure)

    def fail(self, failure: BaseException) -> None:
        """As `set_exception`, also for PyTorch's own callers in C++, which read the value."""
        self._set_unwrap_func(_Failed.reraise)
        self.set_result(_Failed(failure))
