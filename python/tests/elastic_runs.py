"""Runs of elastic jobs, whose ranks say in lines of JSON when their training function begins and ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from jobs import HANG_S, clean_environment

TORCH = Path(__file__).with_name("elastic_job.py")


class Elastic:
    """`paceline run` of a script. The end of the with block kills what still runs."""

    def __init__(self, directory: Path, *flags: str, script: list[str] | None = None, within=list, **env: str) -> None:
        """within gives the command line that runs another one, elsewhere than here."""
        self.directory, self.lines = directory, []
        own = {"OMP_NUM_THREADS": "1"}
        command = script or [sys.executable, "-X", "faulthandler", str(TORCH), str(directory)]
        self.process = subprocess.Popen(
            within(["paceline", "run", *flags, *command]),
            env=clean_environment() | own | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.reader.join()

    def said(self, what):
        """What ranks have said, in order."""
        marked = [line.partition(">:")[2] for line in list(self.lines) if f'"what": "{what}"' in line]
        return [json.loads(line) for line in marked]

    def text(self):
        return "".join(self.lines)

    def wait(self, until):
        """Waits until a condition holds. Fails if the job ends before."""
        deadline = time.monotonic() + HANG_S
        while not (found := until()):
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()
            time.sleep(0.02)
        return found

    def rounds(self, size):
        """The complete rounds of a size: ranks that have begun in one, at the same step and digest."""
        begun = {}
        for line in self.said("begin"):
            begun.setdefault((line["round"], line["step"], line["digest"], line["size"]), {})[line["rank"]] = line
        return [list(ranks.values()) for (*_, n), ranks in begun.items() if n == size and len(ranks) == size]

    def kill(self, member):
        os.kill(member["pid"], signal.SIGKILL)

    def finish(self):
        """Ends the training and returns the exit code."""
        (self.directory / "stop").touch()
        return self.ended()

    def ended(self):
        code = self.process.wait(HANG_S)
        self.reader.join()
        return code


def end_alike(job, size):
    ends = job.said("end")
    assert len(ends) == size and {e["size"] for e in ends} == {size}, job.text()
    assert len({(e["digest"], e["step"]) for e in ends}) == 1, ends


def replace(path: Path, text: str) -> None:
    """Replaces a file at once, so that nobody reads a part."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)
