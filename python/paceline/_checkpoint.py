"""What a rank has in a checkpoint beside the model: the engine's state, and what frameworks' modules add to it.

Its bytes are, for each part, the name's length (4 bytes, little-endian), the name, the length (8 bytes), and the part.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

from paceline._engine import engine

_ENGINE = "engine"


class Part(Protocol):
    """What a module adds."""

    def state(self) -> bytes:
        """What goes into a checkpoint; nothing for a beginning."""

    def reader(self, state: bytes) -> Callable[[], None]:
        """Reads a state and gives what takes it in, which cannot fail. Raises ValueError for what is no state."""


_parts: dict[str, Part] = {}
_unclaimed: dict[str, bytes] = {}  # parts of modules that are not imported yet


def register(name: str, part: Part) -> None:
    """Adds a module's part. It is given what was loaded before."""
    _parts[name] = part
    part.reader(_unclaimed.pop(name, b""))()


def compression_state() -> bytes:
    """What this rank needs to go on from a checkpoint as if training had not ended, beside model and optimizer.

    Of tensors that travel coded: how many iterations they have had, this rank's residuals and a share of the servers';
    and what gates hold back (`DistributedOptimizer(gate=...)`). Every rank saves its own, and calls this at the same
    place, when no operation is in flight.
    """
    parts = {_ENGINE: engine.compression_state()} | _unclaimed | {name: part.state() for name, part in _parts.items()}
    return b"".join(
        struct.pack("<I", len(name)) + name.encode() + struct.pack("<Q", len(part)) + part
        for name, part in sorted(parts.items())
        if part
    )


def load_compression_state(state: bytes) -> None:
    """Takes in what `compression_state` gave on this rank; every rank does so, at the same place.

    It may be before or after optimizers are made; in a job that has trained already, behind a `barrier`: there the
    next sums are an error on all ranks if only some have done so. What the state does not name begins anew. Raises
    ValueError for anything else, and then nothing changes.
    """
    parts = _read(state)
    readers = [part.reader(parts.pop(name, b"")) for name, part in _parts.items()]
    engine.load_compression_state(parts.pop(_ENGINE))
    for take_in in readers:
        take_in()
    _unclaimed.clear()
    _unclaimed.update(parts)


def _read(state: bytes) -> dict[str, bytes]:
    parts, at = {}, 0
    try:
        while at < len(state):
            (length,) = struct.unpack_from("<I", state, at)
            name = state[at + 4 : at + 4 + length].decode()
            at += 4 + length
            (length,) = struct.unpack_from("<Q", state, at)
            parts[name] = state[at + 8 : at + 8 + length]
            at += 8 + length
    except (struct.error, UnicodeDecodeError):
        at = -1
    if at != len(state) or _ENGINE not in parts:
        raise ValueError("these bytes are not what compression_state() gives")
    return parts
