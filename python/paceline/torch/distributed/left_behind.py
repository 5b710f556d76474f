"""Operations that go on when their works have ended: after a timeout of `wait()`, or with their group."""

from __future__ import annotations

import threading
from typing import Any

from paceline.common import abi
from paceline.common.engine import engine

_LOOKS = 2  # how many entries one call looks at: more than it can add


class LeftBehind:
    """Their handles and memory, which the engine may use until they end, or the job does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, tuple[int, Any, Any]] = {}
        self._over = 0  # the last round that has ended

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, round: int, handles: Any, memory: Any) -> None:
        """Keeps what operations of a round of the engine's use, unless the round has ended."""
        with self._lock:
            if round > self._over:
                self._entries[id(handles)] = round, handles, memory

    def ended(self, handles: Any) -> None:
        """The library has told that these have ended: their handles are released, and their memory."""
        if self._entries:
            with self._lock:
                entry = self._entries.pop(id(handles), None)
            if entry is not None:
                engine.release(handles)

    def sweep(self) -> None:
        """Looks at a few, in turn: the library tells of the ends of some only."""
        for _ in range(min(_LOOKS, len(self._entries))):
            self._look()

    def _look(self) -> None:
        with self._lock:
            if not self._entries:
                return
            key = next(iter(self._entries))
            round, handles, memory = entry = self._entries.pop(key)
            if not engine.runs(round) or any(abi.library().pl_poll(h) == abi.PENDING for h in handles):
                self._entries[key] = entry
                return
        engine.release(handles)
        del memory  # without the lock

    def clear(self) -> None:
        """Forgets them all, and those that come later: the job has ended."""
        with self._lock:
            self._over = engine.round
            before, self._entries = self._entries, {}
        del before  # memory is freed without the lock


left_behind = LeftBehind()
engine.at_shutdown(left_behind.clear)
