"""Reductions of gradients that are the same in each step but for the gradients' memory."""

from __future__ import annotations

import ctypes

import torch

from paceline import _abi
from paceline._engine import engine
from paceline.common.exceptions import HorovodInternalError


class Prepared:
    """A parameter's reduction, in place, which costs two stores to start again."""

    __slots__ = ("_dtype", "_grad", "_op", "_round", "_version", "bytes")

    def __init__(self, op: _abi.Op, grad: torch.Tensor) -> None:
        self._op, self._dtype, self._round = op, grad.dtype, engine.round
        self.bytes = grad.nbytes
        self._grad: torch.Tensor | None = None
        self._version = -1

    def takes(self, grad: torch.Tensor | None) -> bool:
        """Whether the operation is that of this gradient: of the same type, and in memory that the engine can use."""
        return (
            grad is not None
            and grad.dtype is self._dtype
            and grad.layout is torch.strided
            and grad.is_cpu
            and grad.is_contiguous()
            and not grad.is_inference()
            and not grad.is_neg()
            and self._round == engine.round
        )

    def of(self, grad: torch.Tensor) -> _abi.Op:
        """The operation on a gradient that it takes, whose memory the caller keeps until the operation has ended."""
        op = self._op
        op.input = op.output = grad.data_ptr()
        self._grad, self._version = grad, grad._version
        return op

    def is_that_of(self, p: torch.Tensor) -> bool:
        """Whether the parameter's gradient is the one of the operation, unchanged."""
        grad = self._grad
        return grad is not None and p.grad is grad and grad._version == self._version

    def let_go(self) -> None:
        """Lets go of the gradient."""
        self._grad = None


class Batch:
    """Prepared reductions in flight, of at most `room` parameters, that are waited for together.

    They are collected while the engine would hold them, so that many are submitted by one call.
    """

    def __init__(self, room: int) -> None:
        self._ops = (_abi.Op * room)()
        self._started: list[tuple[Prepared, torch.Tensor]] = []
        engine.before_wait(self.submit)
        self.drop()

    def drop(self) -> None:
        """Forgets the operations: nobody waits for them. Their memory and handles are released at shutdown."""
        _dropped.append(self._started)
        self._started = []
        self._handles = (ctypes.c_int32 * len(self._ops))()
        self._collected = self._submitted = self._bytes = 0
        self._round = engine.round
        self._gathers = _abi.library().pl_gathers

    def add(self, prepared: Prepared, grad: torch.Tensor) -> None:
        """Starts the reduction of a gradient, now or with later ones. Errors are those of `Engine.submit`."""
        if self._collected == 0:
            self._round = engine.round
        self._ops[self._collected] = prepared.of(grad)
        self._started.append((prepared, grad))
        self._collected += 1
        self._bytes += prepared.bytes
        if self._bytes >= self._gathers():
            self.submit()

    def submit(self) -> None:
        """Submits what is collected."""
        if self._submitted == self._collected:
            return
        first, count, self._bytes = self._submitted, self._collected - self._submitted, 0
        self._collected = first  # if it fails
        engine.submit_into(
            _abi.Op.from_buffer(self._ops, first * ctypes.sizeof(_abi.Op)),
            count,
            ctypes.c_int32.from_buffer(self._handles, first * ctypes.sizeof(ctypes.c_int32)),
        )
        self._collected = self._submitted = first + count

    def wait(self) -> None:
        """Waits until all have ended. Raises HorovodInternalError with the first one's reason if one failed."""
        if self._collected == 0:  # another call has waited
            return
        if self._round != engine.round or not engine.is_initialized():
            self.drop()
            raise HorovodInternalError("the operation was in flight when shutdown() was called")
        handles = (ctypes.c_int32 * self._collected).from_buffer(self._handles)
        failure = engine.wait(handles)
        engine.release(handles)
        for prepared, _ in self._started:
            prepared.let_go()
        self._started.clear()
        self._collected = self._submitted = 0
        if failure is not None:
            raise failure


_dropped: list[list[tuple[Prepared, torch.Tensor]]] = []  # what the engine may still write to
engine.at_shutdown(_dropped.clear)
