"""Starts the ranks of a job as plain processes, the way any launcher does: by environment variables."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import re
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

# Bounds on what hangs. They say nothing of speed: beside other load, an interpreter with PyTorch takes a minute to
# start and to end.
HANG_S = 900
_GRACE_S = 120  # how long the other ranks may continue after one has failed


def example(module: str) -> str:
    """The example of the README that imports the module."""
    blocks = re.findall(r"^```py\n(.*?)^```$", (Path(__file__).parents[2] / "README.md").read_text(), re.M | re.S)
    (found,) = [block for block in blocks if f"import {module} as hvd\n" in block]
    return found


@dataclass
class Ended:
    """The end of one rank: its exit status (negative: the signal that killed it) and its output."""

    status: int
    output: str


class Job:
    """`size` processes of `python argv...`. The end of the with block kills those that still run.

    A rank is a copy of a process that has imported PyTorch, which takes an interpreter three seconds of computing.
    fresh: an interpreter for each, for what depends on its start, its end or its hash seed.
    """

    def __init__(self, size: int, argv: Sequence[str | Path], directory: Path, fresh: bool = False, **env: str) -> None:
        self.size = size
        self.outputs = [directory / f"rank{rank}.out" for rank in range(size)]
        self._killed = set()
        self._held = contextlib.ExitStack()
        common = clean_environment() | {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "PACELINE_PORT": str(self._held.enter_context(reserved_port())),
            "PACELINE_JOB_SECRET": secrets.token_hex(16),
        }
        start = _Fresh if fresh else _Copy
        self.processes = [
            start([*map(str, argv)], common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | _OF_PYTHON | env, path)
            for rank, path in enumerate(self.outputs)
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._held.close()

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
    return ["-c", imports + textwrap.dedent(code)]


def goes_on(code: str, tmp_path: Path, killed: int, **settings: Any) -> None:
    """Runs code on three ranks of an elastic job, one of which kills itself: the others print "done" and their rank."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(code))
    with Job(3, [path], tmp_path, PACELINE_ELASTIC="1", **settings) as job:
        ended = job.wait()
    assert [e.status for e in ended] == [-9 if rank == killed else 0 for rank in range(3)], ended
    assert all(f"done {rank}" in e.output for rank, e in enumerate(ended) if rank != killed), ended


def wait_until_printed(job: Job, text: str, ranks: Sequence[int] | None = None) -> None:
    """Waits until the ranks, every one by default, have printed the text. Fails if a rank ends before."""
    deadline = time.monotonic() + HANG_S
    asked = job.outputs if ranks is None else [job.outputs[rank] for rank in ranks]
    while not all(text in path.read_text() for path in asked):
        assert time.monotonic() < deadline, [path.read_text() for path in job.outputs]
        assert all(p.poll() is None for p in job.processes), [path.read_text() for path in job.outputs]
        time.sleep(0.02)


def wait_until_listens(port: int, process: subprocess.Popen) -> None:
    """Waits until the process listens at the port of this machine. Fails if it ends before."""
    deadline = time.monotonic() + HANG_S
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        assert process.poll() is None and time.monotonic() < deadline, f"nobody listens at port {port}"
        time.sleep(0.02)


def stop(pid: int) -> None:
    """Sends SIGSTOP, and waits until no thread runs: on a crowded machine some go on until another has seen it."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + HANG_S
    while any(_state(thread) != "T" for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.01)


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this machine that only a server which is told it gets: the system gives it to nobody meanwhile.

    A socket holds it, which does not listen; like servers, it lets others have the same address (SO_REUSEADDR).
    """
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", 0))
        yield s.getsockname()[1]


class _Fresh(subprocess.Popen):
    """A rank that is an interpreter of its own."""

    def __init__(self, argv: list[str], env: dict[str, str], output: Path) -> None:
        with output.open("wb") as file:
            super().__init__([sys.executable, *argv], env=env, stdout=file, stderr=subprocess.STDOUT)


class _Copy:
    """A rank that is a copy of the process that has imported PyTorch, with those methods of Popen that tests call."""

    def __init__(self, argv: list[str], env: dict[str, str], output: Path) -> None:
        output.touch()
        self._process = _copies().Process(target=_run, args=(argv, env, output))
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its parent has yet to tell
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# What an interpreter or a library reads when it starts.
_OF_PYTHON = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


@functools.cache
def _copies() -> multiprocessing.context.BaseContext:
    """Starts the process that ranks are copies of. It has one thread, and has not loaded the C library."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "numpy", "pytest"])
    with pytest.MonkeyPatch.context() as environment:
        for name, value in _OF_PYTHON.items():
            environment.setenv(name, value)
        forkserver.ensure_running()
    return context


def _run(argv: list[str], env: Mapping[str, str], output: Path) -> None:
    """Runs `python argv...` in this process."""
    os.environ.clear()
    os.environ.update(env)
    with output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = argv
    try:
        if argv[0] == "-c":
            sys.argv = ["-c", *argv[2:]]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(argv[1], "<string>", "exec"), main.__dict__)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()


def clean_environment() -> dict[str, str]:
    """The environment without the variables of other jobs, with time for ranks that import torch beside other load."""
    others = ("PACELINE_", "HOROVOD_", "DMLC_", "BYTEPS_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")
    places = ("RANK", "LOCAL_", "WORLD_", "MASTER_")
    kept = ("PACELINE_LIBRARY",)
    clean = {k: v for k, v in os.environ.items() if k in kept or not k.startswith(others + places)}
    return clean | {"PACELINE_START_TIMEOUT": "180"}
