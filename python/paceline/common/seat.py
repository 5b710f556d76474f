"""This process's place in a job that changes its size: what it asks the launcher (`paceline run --min-np`)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError

# Rounds that may break, one after the other, before this process has joined one.
_ATTEMPTS = 8
# How long a question for news may take, which the launcher answers within 20 s, and the pause after one that failed.
_WATCH_S = 60.0
_PAUSE_S = 1.0
# How much longer than the launcher's own limit a process waits for its place.
_MARGIN_S = 60.0


class Seat:
    """This process as the launcher knows it. Without such a launcher `elastic` is False, and nothing is asked."""

    def __init__(self) -> None:
        self.has_state = False  # of the training, so that others may get it from here
        self.commits = 0  # how new that is: one that was lost, and comes back, has less than those that went on
        self.settings: Mapping[str, Any] | None = None  # that init was given, for the next rounds
        self._round_commits: int | None = None  # how new the state is that this process gets from the round's others
        self.may_skip = False  # its state is that of the others, unless somebody joins
        self.skip = False  # all ranks of the round have the same state
        self.moved = False  # the round gave it another place than it was told to expect
        self._expected: dict[str, str] | None = None  # variables of the place to expect, until the first round
        self._asked = False
        self._lock = threading.Lock()
        self._news = 0  # the latest that the round knows of
        self._heard = (0, True)  # the latest that came, and whether all since then only remove ranks
        self._watcher: threading.Thread | None = None

    @property
    def elastic(self) -> bool:
        """Whether a launcher started this process that gives it its place."""
        return "PACELINE_ELASTIC_PROCESS" in os.environ

    def join(self, process_sets: Any, settings: Mapping[str, Any] | None) -> None:
        """Takes a place in the launcher's next round, and joins it. Rounds that break before they begin are left.

        A new process, where a round runs, is only told which place to expect: the others train on until it needs them.
        Ends the process, with exit code 0, where there is no place for it: SystemExit.
        """
        self.settings = settings
        for attempt in range(_ATTEMPTS):
            if self._take(early=not self._asked and not process_sets):
                engine.expect(settings, lambda: self.join(process_sets, settings))
                return
            try:
                engine.init(process_sets, settings)
                self._expected = None
                return
            except HorovodInternalError:
                if attempt == _ATTEMPTS - 1:
                    raise
                self.may_skip = False  # others may have been lost

    def _take(self, early: bool) -> bool:
        """Asks for a place. Returns whether it is only one to expect, as early asks for."""
        limit = float(os.environ.get("PACELINE_ELASTIC_TIMEOUT", "600"))
        ask = {"state": self.has_state, "commits": self.commits, "skip": self.may_skip, "early": early}
        try:
            answer = engine.seat(self._process(), ask, 2 * limit + _MARGIN_S)
        except HorovodInternalError as e:
            # Not an error after which the training goes on: the job has ended.
            raise RuntimeError(f"this process has no place in the job any more: {e}") from None
        if answer.get("why"):
            raise SystemExit(0)
        env = answer["env"]
        os.environ.update(env)
        self._asked = True
        if answer.get("early"):
            self._expected = env
            return True
        self.moved = self._expected is not None and not self._expected.items() <= env.items()
        with self._lock:
            self.skip, self.may_skip = bool(answer.get("skip")), False
            self._round_commits = int(answer.get("commits", 0))
            self._news = max(self._news, int(answer.get("news", 0)))
        return False

    def synchronised(self) -> None:
        """This process has the round's state."""
        self.has_state = True
        if self._round_commits is not None:  # once: the training function may be called again in this round
            self.commits, self._round_commits = self._round_commits, None

    def has_moved(self) -> bool:
        """Whether the round gave this process another place than it was told to expect: told once."""
        moved, self.moved = self.moved, False
        return moved

    def watch(self) -> None:
        """Has the launcher tell this process of changed hosts from now on."""
        if self.elastic and self._watcher is None:
            self._watcher = threading.Thread(target=self._listen, name="paceline hosts", daemon=True)
            self._watcher.start()

    def news(self) -> tuple[int, bool]:
        """(number of the latest change of hosts unknown to the round, or 0; whether it only removes ranks)."""
        with self._lock:
            number, removed = self._heard
            return (number, removed) if number > self._news else (0, False)

    def _listen(self) -> None:
        while True:
            with self._lock:
                known = max(self._news, self._heard[0])
            try:
                answer = engine.seat(self._process(), {"watch": True, "news": known}, _WATCH_S)
            except (HorovodInternalError, ValueError):
                time.sleep(_PAUSE_S)
                continue
            number = int(answer.get("news", 0))
            with self._lock:
                if number > known:
                    earlier = self._heard[1] if self._heard[0] > self._news else True
                    self._heard = number, earlier and bool(answer.get("removed"))

    def _process(self) -> int:
        return int(os.environ["PACELINE_ELASTIC_PROCESS"])


seat = Seat()
