"""A rank's state in a checkpoint beside the model: the engine's part, and the parts of the frameworks' modules.

Its bytes: _BEGIN, the CRC-32 of what follows (4 bytes, little-endian), then for each part the name's length (4 bytes),
the name, the part's length (8 bytes) and the part.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.common import declaring
from paceline.common.engine import engine

_BEGIN = b"PLstate1"
_ENGINE = "engine"


class Part(Protocol):
    """A module's part of the state."""

    def state(self) -> bytes:
        """The bytes for a checkpoint; none for the initial state."""

    def reader(self, state: bytes) -> Callable[[], None]:
        """Reads a state and returns a function that restores it and cannot fail. Raises ValueError for other bytes."""


_parts: dict[str, Part] = {}
_unclaimed: dict[str, bytes] = {}  # parts of modules that are not imported yet


def register(name: str, part: Part) -> None:
    """Adds a module's part, and restores the state that was loaded for it before."""
    _parts[name] = part
    part.reader(_unclaimed.pop(name, b""))()


def compression_state() -> bytes:
    """The state that this rank needs, beside model and optimizer, to continue from a checkpoint without a difference.

    It holds, of coded tensors, the number of iterations, this rank's residuals and its share of the servers' residuals,
    and the changes that gates withhold (`DistributedOptimizer(gate=...)`). Every rank saves its own state, and calls
    this at the same place with no operation in flight.
    """
    parts = {_ENGINE: engine.compression_state()} | _unclaimed | {name: part.state() for name, part in _parts.items()}
    return _sealed(
        [
            piece
            for name, part in sorted(parts.items())
            if part
            for piece in (struct.pack("<I", len(name)) + name.encode() + struct.pack("<Q", len(part)), part)
        ]
    )


def load_compression_state(state: bytes | bytearray | memoryview) -> None:
    """Restores what `compression_state` returned on this rank. Every rank calls it, at the same place.

    Call it before or after optimizers are made. In a job that has already trained, call it after a `barrier`: if only
    some ranks restore, the next reductions fail on all ranks. Tensors that the state does not name start at zero.
    Optimizers of PyTorch that take the place of others in the same process have their state if they are made after it,
    MXNet's if they first step after it.
    Raises ValueError for other bytes, also where one bit is another, and TypeError for what is not bytes, and then
    changes nothing.
    """
    if not isinstance(state, (bytes, bytearray, memoryview)):
        raise TypeError(
            "state: give the bytes that compression_state() gave, as bytes, bytearray or memoryview, "
            f"not {type(state).__name__}"
        )
    parts = _read(_opened(bytes(state)))
    readers = [part.reader(parts.pop(name, b"")) for name, part in _parts.items()]
    engine.load_compression_state(parts.pop(_ENGINE))
    for restore in readers:
        restore()
    _unclaimed.clear()
    _unclaimed.update(parts)
    declaring.count_anew()


def _sealed(pieces: Sequence[bytes]) -> bytes:
    """The bytes of a state of these pieces, with their checksum."""
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return b"".join([_BEGIN, struct.pack("<I", checksum), *pieces])


def _opened(state: bytes) -> memoryview:
    """What has been sealed. Raises ValueError for other bytes."""
    start = len(_BEGIN) + 4
    if not state.startswith(_BEGIN) or len(state) < start:
        raise ValueError(f"these bytes are not what compression_state() gives, which begins with {_BEGIN!r}")
    (wanted,), content = struct.unpack_from("<I", state, len(_BEGIN)), memoryview(state)[start:]
    checksum = zlib.crc32(content)
    if checksum != wanted:
        raise ValueError(
            f"what compression_state() gave is damaged: the checksum of the {len(content)} bytes is {checksum:08x}, "
            f"not {wanted:08x}"
        )
    return content


def _read(state: memoryview) -> dict[str, bytes]:
    parts, at = {}, 0
    try:
        while at < len(state):
            (length,) = struct.unpack_from("<I", state, at)
            name = str(state[at + 4 : at + 4 + length], "utf-8")
            at += 4 + length
            (length,) = struct.unpack_from("<Q", state, at)
            parts[name] = bytes(state[at + 8 : at + 8 + length])
            at += 8 + length
    except (struct.error, UnicodeDecodeError):
        at = -1
    if at != len(state) or _ENGINE not in parts:
        raise ValueError("these bytes are not what compression_state() gives")
    return parts
