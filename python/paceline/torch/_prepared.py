"""Reductions of gradients that are the same in each step but for the gradients' memory."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from paceline.common import abi
from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError

_strided = torch.strided


class Prepared:
    """A parameter's reduction, in place, which costs two stores to start again."""

    __slots__ = ("_dtype", "_op", "_round", "_shape")

    def __init__(self, op: abi.Op, grad: torch.Tensor) -> None:
        self._op, self._dtype, self._shape, self._round = op, grad.dtype, grad.shape, engine.round

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


class Batch:
    """Prepared reductions in flight, of at most `room` parameters, that are waited for together.

    They are collected while the engine would hold them, until backward ends at most, so that many are submitted by one
    call. Any thread may submit what is collected, because it waits for other operations. A batch lives, with the memory
    of its gradients, until somebody has waited for it or the job is over.
    """

    def __init__(self, room: int) -> None:
        self._lock = threading.Lock()
        self._ops = (abi.Op * room)()
        self._places = list(self._ops)  # the same memory
        self._prepared: list[Prepared | None] = [
            None
        ] * room  # whose operation is at a place, as backward repeats its order
        self._handles = (ctypes.c_int32 * room)()
        self._gathers = abi.gathers()
        self._begin()
        engine.before_wait(self.submit)

    def _begin(self) -> None:
        self._started: list[torch.Tensor] = []
        self._collected = self._submitted = self._bytes = 0
        self._round = engine.round
        self._failure: BaseException | None = None

    def add(self, prepared: Prepared, grad: torch.Tensor) -> int:
        """Starts the reduction of a gradient, now or with later ones. `wait` raises what goes wrong.

        Returns its place in the batch.
        """
        with self._lock:
            if not self._started:
                self._round = engine.round
                _in_flight.add(self)
            if self._submitted == self._collected:
                torch.autograd.Variable._execution_engine.queue_callback(self.submit)  # at the end of backward
            place = self._collected
            op = self._places[place]
            if self._prepared[place] is not prepared:
                prepared.put(op)
                self._prepared[place] = prepared
            op.input = op.output = grad.data_ptr()  # the memory is kept below until the operation has ended
            self._started.append(grad)
            self._collected = place + 1
            self._bytes += grad.nbytes
            if self._bytes >= self._gathers.value:
                self._submit(at_once=False)
            return place

    def submit(self) -> None:
        """Submits what is collected, since backward has ended or somebody waits."""
        with self._lock:
            if self._submitted < self._collected and engine.runs(self._round):
                self._submit(at_once=True)

    def _submit(self, at_once: bool) -> None:
        last = self._places[self._collected - 1]
        last.at_once = at_once
        first, count, self._bytes = self._submitted, self._collected - self._submitted, 0
        try:
            engine.submit_into(
                abi.Op.from_buffer(self._ops, first * ctypes.sizeof(abi.Op)),
                count,
                ctypes.c_int32.from_buffer(self._handles, first * ctypes.sizeof(ctypes.c_int32)),
            )
            self._submitted += count
        except BaseException as e:
            self._failure, self._collected = self._failure or e, first
        last.at_once = False

    def wait(self) -> None:
        """Waits until all have ended. Raises what went wrong first; HorovodInternalError where a reduction failed."""
        if not self._started:  # another call has waited
            return
        self.submit()
        failure: BaseException | None
        if not engine.runs(self._round):
            failure = _over_before()
        else:
            handles: Any = (ctypes.c_int32 * self._submitted).from_buffer(self._handles)
            failure = engine.wait(handles, release=True) if self._submitted else None
            failure = self._failure or failure
        with self._lock:
            self._begin()
        _in_flight.discard(self)
        if failure is not None:
            raise failure

    def ended(self, place: int) -> bool:
        """Whether the reduction at a place has ended, successfully or not."""
        return place < self._submitted and abi.library().pl_poll(self._handles[place]) != abi.PENDING

    def wait_for(self, place: int) -> None:
        """Waits for one reduction and raises what went wrong; `wait` releases all of them."""
        if place >= self._submitted:
            self.submit()
        if self._failure is not None:
            raise self._failure
        if not engine.runs(self._round):
            raise _over_before()
        handle = self._handles[place]
        if abi.library().pl_poll(handle) != abi.OK and (failure := engine.wait([handle])) is not None:
            raise failure

    def drop(self) -> None:
        """Forgets the operations, of which the other ranks have theirs. They are released at shutdown."""
        self.submit()
        with self._lock:
            _dropped.append(self._started)
            self._begin()


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
_dropped: list[list[torch.Tensor]] = []  # memory to which the engine may still write


def _over() -> None:
    _in_flight.clear()
    _dropped.clear()


engine.at_shutdown(_over)
