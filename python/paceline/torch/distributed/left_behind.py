"""Memory of operations whose works are gone: after Ctrl-C, or a timeout of `wait()`."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

from paceline.common import abi
from paceline.common.engine import engine

_LOOKS = 2  # how many entries one call looks at: more than it can add


class LeftBehind:
    """Their handles and memory, which the engine may use until they end, or the job does.

    There is no lock: works are left where the collector runs, and in a signal's handler.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[int, Any, Any]] = {}
        self._turns = itertools.count(0, _LOOKS)
        self._over = 0  # the last round that has ended

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, round: int, handles: Any, memory: Any) -> None:
        """Keeps what operations of a round of the engine's use, unless the round has ended."""
        if round > self._over:
            self._entries[id(handles)] = round, handles, memory

    def sweep(self) -> None:
        """Looks at a few, in turn, and lets go of those that have ended."""
        if not self._entries:
            return
        with contextlib.suppress(RuntimeError):  # another thread has added one meanwhile
            first = next(self._turns) % max(1, len(self._entries))
            for key, (round, handles, _) in list(itertools.islice(self._entries.items(), first, first + _LOOKS)):
                if round != engine.round:
                    self._entries.pop(key, None)
                    continue
                ended = all(abi.library().pl_poll(h) != abi.PENDING for h in handles)
                if ended and engine.runs(round) and self._entries.pop(key, None) is not None:  # one thread gets it
                    engine.release(handles)

    def clear(self) -> None:
        """Forgets them all, and those that come later: the job has ended."""
        self._over = engine.round
        self._entries.clear()


left_behind = LeftBehind()
engine.at_shutdown(left_behind.clear)
