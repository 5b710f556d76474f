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

import atexit
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
from typing import Any, NamedTuple, NoReturn

import torch

from paceline.common.engine import engine
from paceline.torch.distributed import streams

Devices = list[torch.device]

_IDLE_S = 10.0  # after which a lane's thread ends
_NAME = "paceline futures"
_LOOK_S = 0.005  # how often the end of callbacks is looked for at the process's end
_PATIENCE_S = 10.0  # how long one may take there, before the job is left
_DEEPEST = 8  # lanes that one has begun in another: callbacks that chain themselves for ever stay in the last one
_then: Any = torch._C.Future.then
_add_done_callback: Any = torch._C.Future.add_done_callback


class Lane:
    """The callbacks of one group's works that the program, or one lane, has chained."""

    calls = 0  # that have ended, of all lanes

    def __init__(self, group: str, within: Lane | None) -> None:
        self.name: str = "" if within is None else f" after {group}{within.name}"
        self.depth: int = 0 if within is None else within.depth + 1
        self.lanes: dict[str, Lane] = {}  # of what its callbacks chain, by group
        # Futures, those that are completed after them, in turn, and the devices of the threads that chained them.
        self._entries: deque[tuple[Any, Any, torch.device | None]] = deque()
        self._looks: queue.SimpleQueue[Any] = queue.SimpleQueue()  # an item for each look at the first entry
        self._has_thread = False  # which ends when it has had nothing to do for a while
        self._runs = threading.Lock()  # of one thread: there may be another for a moment
        self._calls = False

    def add(self, future: Any, turn: Any, devices: Devices) -> None:
        """Has `turn` be completed when the future is, and all that came before."""
        try:
            self._entries.append((future, turn, streams.current_device(devices)))
            if not self._has_thread:
                self._begin()
        finally:  # also after Ctrl-C: others come behind it
            _add_done_callback(future, self._looks.put)  # in C alone: PyTorch swallows Ctrl-C that comes in a callback

    def _begin(self) -> None:
        thread = threading.Thread(target=self._run, name=_NAME)
        try:
            self._has_thread = True
            _running[thread] = self
            thread.start()
        except BaseException:
            if not thread.is_alive():  # else Ctrl-C has come when it had begun
                self._has_thread = False
                _running.pop(thread, None)
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
                    _complete(*self._entries.popleft())
                    self._calls = False
                    Lane.calls += 1
        _running.pop(threading.current_thread(), None)

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


def _complete(_: Any, turn: Any, device: torch.device | None) -> None:
    with streams.within(device):  # PyTorch's callbacks have the device of the thread that completes their future
        turn.set_result(None)


_program = Lane("", None)
_running: dict[threading.Thread, Lane] = {}


class _Here(threading.local):
    lane = _program  # whose callback this thread runs


_here = _Here()


class Known(NamedTuple):
    """How callbacks are chained to a future: by whose works, and minding the streams of which devices."""

    group: str
    devices: Devices


# Those that `then` and `collect_all` have returned.
_chained: weakref.WeakKeyDictionary[Any, Known] = weakref.WeakKeyDictionary()


def lane_name() -> str:
    """The name of the lane that the caller is in, which is the same on all ranks; empty outside of callbacks."""
    return _here.lane.name


def _lane_of(group: str) -> Lane:
    within = _here.lane
    if within.depth >= _DEEPEST:
        return within
    return within.lanes.get(group) or within.lanes.setdefault(group, Lane(group, within))


def _end_lanes() -> None:
    """Ends the threads of lanes at the process's end, before Python waits for them: others end first.

    Where an exception ends the process, or sys.exit, they may wait for what comes no more: then their operations end
    with the job.
    """
    while others := [t for t in threading.enumerate() if _is_waited_for(t)]:
        others[0].join()
    patience = _Patience()
    while any(lane.works() for lane in list(_running.values())):
        if hasattr(sys, "last_value") or patience.is_over():
            engine.leave_at_exit()
        time.sleep(_LOOK_S)
    for lane in list(_running.values()):
        lane.end()


def _end_last_lanes() -> None:
    """Ends the threads of lanes that handlers of atexit have begun, which Python does not wait for.

    When the interpreter is gone, a thread in PyTorch's C++, for example one that has just completed what such a handler
    waited for, would abort the process.
    """
    with contextlib.suppress(KeyboardInterrupt):
        if not _threads_end() and engine.is_initialized():
            engine.leave_at_exit()
            _threads_end()


def _threads_end() -> bool:
    """Waits until the threads of lanes have ended, also of those that callbacks begin meanwhile."""
    patience, told = _Patience(), set()
    while _running and not patience.is_over():
        for thread, lane in list(_running.items()):
            if thread not in told and not lane.works():
                told.add(thread)
                lane.end()
        time.sleep(_LOOK_S)  # not a join of one: others may begin and end meanwhile, and renew the patience
    return not _running


class _Patience:
    """Is over when no callback has ended for a while."""

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        self._calls, self._until = Lane.calls, time.monotonic() + _PATIENCE_S

    def is_over(self) -> bool:
        if self._calls != Lane.calls:
            self._renew()
        return time.monotonic() > self._until


def _is_waited_for(thread: threading.Thread) -> bool:
    return not thread.daemon and thread.name != _NAME and thread is not threading.main_thread()


def _chain(future: Any, known: Known, callback: Callable[[Any], Any]) -> Any:
    turn: Any = torch.futures.Future(devices=[*known.devices])
    child = _then(turn, lambda _: _called(callback, future, known.devices))
    _chained[child] = known
    _lane_of(known.group).add(future, turn, known.devices)
    return child


def _listen(future: Any, known: Known, callback: Callable[[Any], Any]) -> None:
    turn: Any = torch.futures.Future(devices=[*known.devices])
    _add_done_callback(turn, lambda _: _called(callback, future, known.devices))
    _lane_of(known.group).add(future, turn, known.devices)


def _called(callback: Callable[[Any], Any], future: Any, devices: Devices) -> Any:
    """Calls it, in a stream that follows what is queued for the future's values."""
    if devices:
        with contextlib.suppress(Exception):  # of a future that has failed: the callback finds out
            streams.use(future)
    return callback(future)


@functools.cache
def install() -> None:
    """Has futures that `then` returns chain callbacks as the works' own do: PyTorch makes them, of its own class."""
    collect: Any = torch._C._collect_all

    @functools.wraps(_then)
    def then(self: Any, callback: Any) -> Any:
        known = _chained.get(self)
        return _then(self, callback) if known is None else _chain(self, known, callback)

    @functools.wraps(_add_done_callback)
    def add_done_callback(self: Any, callback: Any) -> None:
        known = _chained.get(self)
        if known is None:
            _add_done_callback(self, callback)
        else:
            _listen(self, known, callback)

    @functools.wraps(collect)
    def collect_all(futures: Any) -> Any:
        collected = collect(futures)
        known = [known for f in futures if (known := _known(f)) is not None]
        if known:
            _chained[collected] = Known(known[0].group, list({d for each in known for d in each.devices}))
        return collected

    exits: list[Any] = threading._threading_atexits  # type: ignore[attr-defined]
    exits.insert(0, _end_lanes)  # is called last: threads of pools have ended then
    atexit.register(_end_last_lanes)
    os.register_at_fork(after_in_child=_forget)  # their threads are not there
    setattr(torch._C, "_collect_all", collect_all)  # noqa: B010
    setattr(torch._C.Future, "then", then)  # noqa: B010
    setattr(torch._C.Future, "add_done_callback", add_done_callback)  # noqa: B010


def _forget() -> None:
    _program.lanes.clear()
    _running.clear()


def _known(future: Any) -> Known | None:
    return future.known if isinstance(future, WorkFuture) else _chained.get(future)


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
        self.known = Known(group, devices)

    def then(self, callback: Any) -> Any:
        """A future of what the callback returns, which gets this future on its lane."""
        return _chain(self, self.known, callback)

    def add_done_callback(self, callback: Any) -> None:
        """Has the callback get this future on its lane."""
        _listen(self, self.known, callback)

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
