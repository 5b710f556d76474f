"""Messages from one rank to another, for frameworks: bytes at an address, matched by source and tag.

They need no declaration and no other rank, and go their own way beside collective operations.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

from paceline.common import abi
from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError

ANY = abi.ANY_RANK

MAX_TAG = 2**64 - 1


class Message:
    """One end of a message in flight. It lives, with `keep`, until it is waited for."""

    def __init__(self, op: abi.Op, keep: Any) -> None:
        self._round = engine.round
        self._keep = keep
        self._source: int | None = None
        self._error: BaseException | None = None
        self._handles = abi.no_handles(1)
        self._ended = False
        _in_flight.add(self)  # before the engine has it: then Ctrl-C may come
        try:
            engine.submit_into(op, 1, self._handles)
        except BaseException:
            if self._handles[0] == abi.NO_HANDLE:
                _in_flight.discard(self)
            raise

    def done(self) -> bool:
        """Whether the message has been received, or has failed, so that `wait` will not wait."""
        return self._ended or self._round != engine.round or engine.ended(self._handles[0])

    def wait(self) -> None:
        """Waits until the receiver has the message. A second call does nothing, or raises the same error.

        Raises HorovodInternalError, which names ranks and tag, if the lengths differ, the timeout has passed, the other
        rank has left or was lost, or the job was shut down. Ctrl-C ends the wait, not the message.
        """
        if not self._ended:
            self._end()
        if self._error is not None:
            raise self._error

    @property
    def source(self) -> int:
        """The rank that sent the message, of a receive that `wait` has returned for."""
        if self._source is None:
            raise ValueError("the source of a message is known when wait() has returned")
        return self._source

    def _end(self) -> None:
        if not engine.runs(self._round):
            self._error = HorovodInternalError("the message was in flight when shutdown() was called")
        else:
            self._error = engine.wait(self._handles)
            if self._error is None:
                self._source = engine.result(self._handles[0])[2]
            engine.release(self._handles)
        self._ended, self._keep = True, None
        _in_flight.discard(self)


_in_flight: set[Message] = set()


def send(
    address: int,
    nbytes: int,
    to: int,
    tag: int = 0,
    *,
    timeout: float | None = None,
    authenticated: bool = False,
    keep: Any = None,
) -> Message:
    """Sends the bytes at an address to a rank. They must not change before the message is done.

    tag: a number of 64 bits; a receive takes messages with the same tag alone, in the order in which their sender has
    submitted them. timeout: seconds after which the message fails; None: never. authenticated: the receiver interprets
    the bytes, for example unpickles them. keep: what owns the memory. Raises ValueError for a rank that is not in the
    job, or a tag out of bounds.
    """
    return _message(abi.SEND, address, nbytes, to, tag, timeout, authenticated, keep)


def recv(
    address: int,
    nbytes: int,
    source: int = ANY,
    tag: int = 0,
    *,
    timeout: float | None = None,
    authenticated: bool = False,
    keep: Any = None,
) -> Message:
    """Receives a message of so many bytes from a rank, or ANY, into the memory at an address.

    A message of another length fails at both ends, and is dropped. The other arguments are those of `send`;
    authenticated: the message must have been sent so.
    """
    return _message(abi.RECEIVE, address, nbytes, source, tag, timeout, authenticated, keep)


def _message(
    kind: int, address: int, nbytes: int, peer: int, tag: int, timeout: float | None, authenticated: bool, keep: Any
) -> Message:
    if not 0 <= tag <= MAX_TAG:
        raise ValueError(f"tag {tag}: allowed are 0 to {MAX_TAG}")
    peer = abi.int32(peer, "rank")
    op = abi.Op(size=ctypes.sizeof(abi.Op), kind=kind, root=peer, tag=tag, authenticated=authenticated)
    op.ndim, op.shape = 1, (ctypes.c_int64 * 1)(nbytes)
    op.prescale = op.postscale = 1.0
    if kind == abi.SEND:
        op.input = address or None
    else:
        op.output = address or None
    if timeout is not None:
        op.timeout_ms = max(1, math.ceil(timeout * 1000))
    return Message(op, keep)
