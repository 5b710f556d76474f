"""Operations in flight, as torch.distributed sees them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C import _autograd
from torch._C._distributed_c10d import Work
from torch.distributed import DistBackendError

from paceline.common import abi
from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError
from paceline.torch._untraced import untraced
from paceline.torch.distributed import streams
from paceline.torch.distributed.callbacks import WorkFuture
from paceline.torch.distributed.left_behind import left_behind
from paceline.torch.distributed.memory import devices_of

_SLICE_S = 0.1  # how long one wait stays in C, where Ctrl-C and an abort are not seen
_LOOK_S = 0.0005  # how often a device's stream is looked at
_TIMED_OUT = re.compile(r"has waited (\S+) for .*, its timeout")  # the engine's words


@untraced
class PacelineWork(Work):
    """One call of torch.distributed: one or more of the engine's operations.

    finish: makes the outputs once all have ended well, given the handles. memory: what the engine uses until then.
    outputs: what `result()` and the future have. group: whose callbacks its own are in turn with. closed: set when the
    group ends.
    """

    _in_flight = False  # whether the engine may use the memory; also where Ctrl-C has come before __init__

    def __init__(
        self,
        what: str,
        memory: Any,
        finish: Callable[[Any], None] | None,
        outputs: Any,
        group: str,
        closed: threading.Event,
    ) -> None:
        super().__init__()
        self._what, self._memory, self._finish, self._outputs = what, memory, finish, outputs
        self._devices = list(devices_of([outputs, memory]))
        self._output_devices = [] if finish is None else list(devices_of(outputs))
        # What the program has queued before the call may still read the outputs.
        self._before = streams.reached(self._output_devices)
        self._infers = torch.is_inference_mode_enabled()
        self._handles: Any = None
        self._open = 0  # operations of which the library has still to tell
        self._is_left = False  # by the library's thread to the one that ends it now
        self._collects = False  # somebody makes the outputs: the thread, or one of its handlers
        # Of who ends the work. A signal's handler may end it while its own thread does.
        self._lock = threading.RLock()
        self._ended = False
        self._failure: BaseException | None = None
        self._future: WorkFuture | None = None
        self._group = group
        self._profiled: Any = None
        self.closed = closed
        self.sender = [-1]  # rank in the group, for a receive that has ended
        self.round = engine.round

    def start(self, ops: Any, count: int, tell: bool) -> None:
        """Submits the operations. tell: the library tells of their ends, so that a future may be asked for."""
        left_behind.sweep()
        if self.closed.is_set():
            raise DistBackendError(f"{self._what} was called when its process group had been destroyed or aborted")
        self._handles = abi.no_handles(count)
        try:
            if tell:
                self._future = WorkFuture(self._group, self._devices)
                self._open = count
                _watched.add(self, ops)
            self._in_flight = True
            engine.submit_into(ops, count, self._handles)
        except BaseException as e:
            if self._handles[0] == abi.NO_HANDLE:  # else the engine has them, and Ctrl-C came then
                self._in_flight = False
                _watched.remove(self)
            raise _translated(e) from None
        if self.closed.is_set():  # a group that ends meanwhile ends this work too
            self.abort()

    def __del__(self) -> None:
        """Leaves behind what the engine uses, for example after Ctrl-C: nobody can wait for it any more."""
        if self._in_flight and self._handles[0] != abi.NO_HANDLE:
            left_behind.add(self.round, self._handles, self._memory)

    def profile(self, title: str, tensors: list[torch.Tensor]) -> None:
        """Has the profiler record the operation until it ends."""
        self._profiled = _autograd._record_function_with_args_enter(title, *tensors)
        self._recorded = threading.Event()

    # What torch.distributed calls

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until the outputs are there. Raises DistBackendError where the operation fails or takes too long.

        After a timeout of this wait the operation goes on: the engine may still use its memory. It can be waited for
        again.
        """
        if not self._ended:
            self._await(timeout.total_seconds())
        if self._profiled is not None:
            self._recorded.wait(_SLICE_S)
        self._meet_future()
        if self._failure is not None:
            raise self._failure
        return True

    def synchronize(self) -> None:
        """The outputs are there when `wait` returns."""
        self.wait()

    def block_current_stream(self) -> None:
        """Waits. PyTorch's own has the current stream wait for the future, and so what must be done before it ends."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation has ended, successfully or not."""
        if not self._ended:
            if self._done() and not self._is_behind():
                self._settle(None)
            elif self.closed.is_set():
                self.abort()
        if self._ended:
            self._meet_future()
        return self._ended

    def is_success(self) -> bool:
        """Whether the operation has ended successfully."""
        return self.is_completed() and self._failure is None

    def exception(self) -> BaseException | None:
        """The error of an operation that has failed."""
        return self._failure if self.is_completed() else None

    def result(self) -> Any:
        """The outputs of an operation that has ended. Raises RuntimeError before: the engine still writes them."""
        if not self.is_completed():
            raise RuntimeError(
                f"{self._what} has not ended: Work needs to be completed before calling result(). Should call wait() "
                "before result()."
            )
        return self._outputs

    def source_rank(self) -> int:
        """The rank in the group from which a receive from anybody got its tensor."""
        return self.sender[0]

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future whose value are the outputs."""
        if self._future is None:  # the caller waits by itself: async_op=False
            future = WorkFuture(self._group, self._devices)
            try:
                self.wait()
                future.set_result(self._outputs)
            except Exception as e:
                future.fail(e)
            self._future = future
        return self._future

    get_future_result = get_future

    # How it ends

    def abort(self) -> None:
        """Ends the work with an error, unless it has ended: its group is no more."""
        self._settle(self._gone("aborted"))

    def _meet_future(self) -> None:
        """Completes the future of a work that has ended, perhaps on another thread, which is about to do so.

        PyTorch's code in C++ reads the future's value after `wait()`, and fails where it is not there.
        """
        future = self._future
        if future is not None and not future.done():
            try:
                future.complete(self._outputs, self._failure)
            except RuntimeError:
                if not future.done():
                    raise  # else the other thread has

    def _await(self, limit: float) -> None:
        """Waits until the work has ended; limit: seconds, 0 for as long as the operations may take."""
        lib, handles, count = abi.library(), self._handles, len(self._handles)
        until = time.monotonic() + limit if limit > 0 else math.inf
        while not self._ended:
            left = until - time.monotonic()
            if left <= 0:
                raise DistBackendError(
                    f"{self._what}: Timed out waiting {limit:g} s, as wait() was asked to. It goes on: wait() again, "
                    "and leave its tensors alone until then"
                )
            if not engine.runs(self.round):
                self._settle(self._gone("destroyed"))
            elif self.closed.is_set():
                self.abort()
            else:
                status = lib.pl_wait_all(handles, count, max(1, int(1000 * min(left, _SLICE_S))))
                if status == abi.ERR_INVALID and not self._done():
                    raise engine.last_error(status)  # as in a function that the library calls
                if status == abi.ERR_TIMEOUT:
                    continue
                if self._is_behind():
                    time.sleep(_LOOK_S)
                else:
                    self._settle(None)

    def _gone(self, why: str) -> BaseException:
        return DistBackendError(f"{self._what} was in flight when its process group was {why}")

    def _done(self) -> bool:
        if not engine.runs(self.round):
            return True
        poll = abi.library().pl_poll
        return all(poll(h) != abi.PENDING for h in self._handles)

    def _is_behind(self) -> bool:
        """Whether a device has still to do what the program queued before the call. Then no output may be made yet."""
        try:
            if not self._before or not engine.runs(self.round) or all(event.query() for event in self._before):
                return False
        except Exception:  # of the device: the work ends with it
            return False
        return engine.end_of(self._handles) is None  # else there will be no outputs

    def _end_profile(self) -> None:
        _autograd._record_function_with_args_exit(self._profiled)
        self._profiled = None
        self._recorded.set()

    def told(self, place: int, handle: int) -> None:
        """The library tells that an operation has ended, perhaps before `start` has returned."""
        self._handles[place] = handle
        self._open -= 1
        if self._open == 0:
            if self._is_behind():  # for how long nobody knows, and the library tells of other works on this thread
                with contextlib.suppress(RuntimeError):  # there may be no more threads
                    threading.Thread(target=self._end_later, name="paceline device", daemon=True).start()
                    return
            self._end_told()

    def _end_later(self) -> None:
        while not self._ended and self._is_behind():
            if self.closed.is_set():
                self.abort()
            time.sleep(_LOOK_S)
        self._end_told()

    def _end_told(self) -> None:
        # Who has the lock ends the work. That may be a signal's handler which waits for this thread to return.
        self._is_left = True
        if self._lock.acquire(timeout=_SLICE_S):
            try:
                self._is_left = False
                self._end(None)
                self._let_go()
            finally:
                self._lock.release()
            self._meet_future()
        if self._profiled is not None:  # here, on another thread than it began: it is asynchronous
            self._end_profile()

    def _settle(self, failure: BaseException | None) -> None:
        """Ends the work once: with the outputs or their error, or with another error while its operations go on."""
        try:
            with self._lock:
                self._end(failure)
        except BaseException:
            if self._is_left:  # the library's thread does not come again
                self._settle(None)
            raise
        self._meet_future()

    def _end(self, failure: BaseException | None) -> None:
        """As `_settle`, with the lock. Ctrl-C may come anywhere: then the next call ends the work."""
        if self._ended:
            return
        if failure is None and not engine.runs(self.round):
            failure = self._gone("destroyed")
        within, collects = self._collects, failure is None
        if collects:
            try:
                self._collects = True
                failure = self._collect()
            finally:
                self._collects = within
        if not self._ended:  # else a signal's handler has ended it meanwhile
            self._failure = failure
            self._ended = True
        if collects and not within:  # else a handler does, and what it has interrupted still uses them
            self._let_go()

    def _let_go(self) -> None:
        """The engine's operations have ended."""
        if self._in_flight:
            self._in_flight = False
            if engine.runs(self.round):
                engine.release(self._handles)
            self._memory = self._finish = None

    def _collect(self) -> BaseException | None:
        try:
            if (failure := engine.end_of(self._handles)) is not None:
                return _translated(failure)
            if self._finish is not None:
                with torch.inference_mode(self._infers), streams.ours(self._output_devices):
                    self._before = []
                    self._finish(self._handles)
            return None
        except Exception as e:
            return _translated(e)


def _translated(error: BaseException) -> BaseException:
    if not isinstance(error, HorovodInternalError):
        return error
    text = str(error)
    late = _TIMED_OUT.search(text)
    return DistBackendError(f"[paceline] Timed out waiting {late[1]}: {text}" if late else text)  # Gloo's words


class _Watched:
    """Works of whose ends the library tells."""

    def __init__(self) -> None:
        self._keys = itertools.count(1)
        self._works: dict[int, tuple[PacelineWork, int]] = {}
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)(self._told)
        self._address = ctypes.cast(self._call, ctypes.c_void_p).value

    def add(self, work: PacelineWork, ops: Any) -> None:
        for place, op in enumerate([ops] if isinstance(ops, abi.Op) else ops):
            key = next(self._keys)
            op.done, op.done_arg = self._address, key
            self._works[key] = work, place

    def remove(self, work: PacelineWork) -> None:
        for key, (watched, _) in list(self._works.items()):
            if watched is work:
                self._works.pop(key, None)

    def of(self, closed: threading.Event) -> set[PacelineWork]:
        """Those of a group."""
        return {work for work, _ in list(self._works.values()) if work.closed is closed}

    def _told(self, key: int, handle: int, status: int) -> None:
        known = self._works.pop(key, None)
        if known is not None:
            known[0].told(known[1], handle)


_watched = _Watched()


def close(closed: threading.Event) -> None:
    """Ends the works of a group with an error: those with a future at once, others when they are asked."""
    closed.set()
    for work in _watched.of(closed):
        work.abort()
