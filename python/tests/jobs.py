"""Starts the ranks of a job as plain processes, the way any launcher does: by environment variables."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Bounds on what hangs. They say nothing of speed: beside other load, an interpreter with PyTorch takes a minute to
# start and to end.
HANG_S = 900
_GRACE_S = 120  # how long the other ranks may continue after one has failed


@dataclass
class Ended:
    """The end of one rank: its exit status (negative: the signal that killed it) and its output."""

    status: int
    output: str


class Job:
    """`size` processes of `python argv...`. The end of the with block kills those that still run."""

    def __init__(self, size: int, argv: Sequence[str | Path], directory: Path, **env: str) -> None:
        self.size = size
        self.outputs = [directory / f"rank{rank}.out" for rank in range(size)]
        port, secret = _free_port(), secrets.token_hex(16)
        self.processes = []
        self._killed = set()
        for rank, path in enumerate(self.outputs):
            own = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "PACELINE_PORT": str(port),
                "PACELINE_JOB_SECRET": secret,
                "PACELINE_START_TIMEOUT": "180",  # eight ranks that import torch on two cores take long
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
            }
            with path.open("wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *map(str, argv)],
                        env=_clean_environment() | own | env,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def kill(self, rank: int) -> None:
        """Kills a rank."""
        self._killed.add(rank)
        self.processes[rank].kill()

    def wait(self) -> list[Ended]:
        """Waits for all ranks. If one fails that was not killed, the others are ended after a grace period."""
        deadline = time.monotonic() + HANG_S
        for process in self.processes:
            while process.poll() is None and time.monotonic() < deadline:
                try:
                    process.wait(0.1)
                except subprocess.TimeoutExpired:
                    if any(p.poll() for i, p in enumerate(self.processes) if i not in self._killed):
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)  # faulthandler then prints where it hangs
        return [
            Ended(process.wait(), path.read_text(errors="replace"))
            for process, path in zip(self.processes, self.outputs, strict=True)
        ]

    def succeed(self) -> list[str]:
        """Waits for all ranks, asserts that none failed, and returns their outputs."""
        ended = self.wait()
        failed = [f"rank {i} ended with {e.status}:\n{e.output[-6000:]}" for i, e in enumerate(ended) if e.status]
        assert not failed, "\n\n".join(failed)
        return [e.output for e in ended]


def script(code: str) -> list[str]:
    """The arguments of an interpreter that runs the code, with Paceline as hvd."""
    imports = "import os, sys, time, torch\nimport paceline.torch as hvd\n"
    return ["-X", "faulthandler", "-c", imports + textwrap.dedent(code)]


def wait_until_printed(job: Job, text: str) -> None:
    """Waits until every rank has printed the text. Fails if a rank ends before."""
    deadline = time.monotonic() + HANG_S
    while not all(text in path.read_text() for path in job.outputs):
        assert time.monotonic() < deadline, [path.read_text() for path in job.outputs]
        assert all(p.poll() is None for p in job.processes), [path.read_text() for path in job.outputs]
        time.sleep(0.02)


def _clean_environment() -> dict[str, str]:
    """The environment without the variables of other jobs."""
    prefixes = ("PACELINE_", "HOROVOD_", "DMLC_", "BYTEPS_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")
    kept = ("PACELINE_LIBRARY",)
    return {k: v for k, v in os.environ.items() if k in kept or not k.startswith(prefixes)}


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
