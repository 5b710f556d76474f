"""Reductions of gradients that are the same in each step but for the gradients' memory."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.common import abi
from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError
from paceline.torch._gradient_hooks import Watched

_strided = torch.strided


class Prepared:
    """A parameter's reduction, in place, which costs two stores to start again."""

    __slots__ = ("_dtype", "_op", "_round", "_shape", "bytes")

    def __init__(self, op: abi.Op, grad: torch.Tensor) -> None:
        self._op, self._dtype, self._shape, self._round = op, grad.dtype, grad.shape, engine.round
        self.bytes = grad.nbytes

    def takes(self, grad: torch.Tensor) -> bool:
        """Whether the operation fits the gradient: its type, its shape, and memory that the engine can use."""
        return (
            grad.dtype is self._dtype
            and grad.layout is _strided
            and grad.shape == self._shape
            and grad.is_cpu
            and grad.is_contiguous()
            and not grad.is_neg()
            and self._round == engine.round
        )

    def put(self, op: abi.Op) -> None:
        """Makes the operation of another place that of the parameter, but for the memory."""
        ctypes.memmove(ctypes.byref(op), ctypes.byref(self._op), ctypes.sizeof(op))
        op.later = True  # `Batch.wait` says what is wrong


class Collector:
    """Parameters whose gradients backward has made and nobody has looked at yet.

    What a hook does in backward costs most there, where its code and data are no longer in the processor's cache. So it
    only leaves its parameter here. They are looked at, all together, when backward ends, when somebody waits, or as
    soon as they have as many bytes as the engine would hold.
    """

    __slots__ = ("_begins", "_bytes", "_full", "_gathers", "_idle", "_params", "lock")

    def __init__(self, begins: Callable[[], None], full: Callable[[], None]) -> None:
        """begins: called before a backward pass leaves its first gradient. full: when the engine would hold no more.

        Both are methods, which are called while their object lives.
        """
        self._begins, self._full = weakref.WeakMethod(begins), weakref.WeakMethod(full)
        self._params: list[torch.Tensor] = []
        self._bytes = 0
        self._idle = True  # the next gradient is a backward's first
        self._gathers = abi.gathers()
        # Held from taking parameters until their reductions have started, so that who waits finds them under way. A
        # signal handler may wait too, and finds that its own thread has the lock.
        self.lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._params)

    def hook(self, watched: Watched, ready: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """A hook on a parameter. ready: for gradients of which more is to come, and where no reduction is prepared."""
        append = self._params.append

        def hook(p: torch.Tensor) -> None:
            prepared = watched.prepared
            if prepared is None or watched.left != 1 or (self._idle and not self._begin()):
                ready(p)
                return
            watched.left = 0
            append(p)
            self._bytes += prepared.bytes
            if self._bytes >= self._gathers.value and (full := self._full()) is not None:
                full()

        return hook

    def _begin(self) -> bool:
        """Begins a backward pass. False: the optimizer no longer exists, so that `ready` removes the hook."""
        begins = self._begins()
        if begins is None:
            return False
        begins()
        self._idle = False
        return True

    def take(self, last: bool) -> list[torch.Tensor]:
        """All that are here. last: the next one is a backward's first, as far as is known."""
        params = self._params[:]
        del self._params[: len(params)]  # others may be added meanwhile
        self._bytes, self._idle = 0, last
        return params

    def forget(self) -> None:
        """Lets go of all that are here, which would stay for ever: a parameter's hooks are no part of what gc sees."""
        self._params.clear()
        self._idle = True


class Batch:
    """Prepared reductions in flight, of at most `room` parameters, that are waited for together.

    A batch lives, with the memory of its gradients, whatever becomes of these, until somebody has waited for it or the
    job is over.
    """

    def __init__(self, room: int) -> None:
        self._lock = threading.Lock()
        self._ops = (abi.Op * room)()
        self._places = list(self._ops)  # the same memory
        # Whose operation is at a place, as backward repeats its order.
        self._prepared: list[Prepared | None] = [None] * room
        self._handles = (ctypes.c_int32 * room)()
        self._begin()

    def _begin(self) -> None:
        self._started: list[torch.UntypedStorage] = []
        self._submitted = 0
        self._round = engine.round
        self._failure: BaseException | None = None

    def start(
        self,
        prepared: Sequence[Prepared],
        storages: Sequence[torch.UntypedStorage],
        addresses: Sequence[int],
        at_once: bool,
    ) -> None:
        """Starts the reductions of gradients at these addresses, in these storages. `wait` raises what goes wrong.

        at_once: the program waits next.
        """
        with self._lock:
            if not self._started:
                self._round = engine.round
                _in_flight.add(self)
            self._started += storages
            for place, (one, address) in enumerate(zip(prepared, addresses, strict=True), self._submitted):
                op = self._places[place]
                if self._prepared[place] is not one:
                    one.put(op)
                    self._prepared[place] = one
                op.input = op.output = address
            self._submit(len(storages), at_once)

    def _submit(self, count: int, at_once: bool) -> None:
        first, last = self._submitted, self._places[self._submitted + count - 1]
        last.at_once = at_once
        self._handles[first + count - 1] = abi.NO_HANDLE
        try:
            engine.submit_into(
                abi.Op.from_buffer(self._ops, first * ctypes.sizeof(abi.Op)),
                count,
                ctypes.c_int32.from_buffer(self._handles, first * ctypes.sizeof(ctypes.c_int32)),
            )
        except BaseException as e:
            self._failure = self._failure or e
        if self._handles[first + count - 1] != abi.NO_HANDLE:  # also where Ctrl-C came when they were submitted
            self._submitted += count
        last.at_once = False

    def wait(self) -> None:
        """Waits until all have ended. Raises what went wrong first; HorovodInternalError where a reduction failed."""
        if not self._started:  # another call has waited
            return
        self._raise_interrupt()
        failure: BaseException | None
        handles: Any = None
        if not engine.runs(self._round):
            failure = _over_before()
        else:
            failure = None
            if self._submitted:
                handles = (ctypes.c_int32 * self._submitted).from_buffer_copy(self._handles)
                failure = engine.wait(handles)
            failure = self._failure or failure
        with self._lock:
            self._begin()
        _in_flight.discard(self)
        if handles is not None:
            engine.release(handles)
        if failure is not None:
            raise failure

    def _raise_interrupt(self) -> None:
        """Raises Ctrl-C that came during a submission, once: the next call waits."""
        if self._failure is not None and not isinstance(self._failure, Exception):
            interrupt, self._failure = self._failure, None
            raise interrupt

    def ended(self, place: int) -> bool:
        """Whether the reduction at a place has ended, successfully or not."""
        return place < self._submitted and abi.library().pl_poll(self._handles[place]) != abi.PENDING

    def wait_for(self, place: int) -> None:
        """Waits for one reduction and raises what went wrong; `wait` releases all of them."""
        self._raise_interrupt()
        if self._failure is not None:
            raise self._failure
        if not engine.runs(self._round):
            raise _over_before()
        handle = self._handles[place]
        if abi.library().pl_poll(handle) != abi.OK and (failure := engine.wait([handle])) is not None:
            raise failure


class Member:
    """One reduction of a batch, which is waited for alone when this is called."""

    __slots__ = ("_batch", "_place")

    def __init__(self, batch: Batch, place: int) -> None:
        self._batch, self._place = batch, place

    def ended(self) -> bool:
        """Whether the reduction has ended."""
        return self._batch.ended(self._place)

    def __call__(self) -> None:
        """Waits for the reduction."""
        self._batch.wait_for(self._place)


def _over_before() -> HorovodInternalError:
    return HorovodInternalError("the operation was in flight when shutdown() was called")


_in_flight: set[Batch] = set()
engine.at_shutdown(_in_flight.clear)
