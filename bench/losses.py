"""Trains examples/elastic_digits.py twice, in peace and under losses: python bench/losses.py --help.

Each --every seconds one worker and one dedicated server get SIGKILL. Another server is started at once; the launcher
starts another worker. Both runs must end with exit code 0 and identical parameters on all workers. This script fails if
they do not, or if the accuracies differ by more than --tolerance.
"""

import argparse
import contextlib
import os
import random
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "examples" / "elastic_digits.py"
PLACE = re.compile(r"rank (\d+) of (\d+) \(pid (\d+)\) trains")
ACCURACY = re.compile(r"test accuracy: ([\d.]+)%")


class Job:
    """A training by `paceline run` with dedicated servers. Use it in a with block, at whose end its processes end."""

    def __init__(self, workers, servers, epochs):
        self.workers, self.count = workers, servers
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.scheduler = f"127.0.0.1:{free.getsockname()[1]}"
        self.environment = os.environ | {"PACELINE_JOB_SECRET": secrets.token_hex(16), "PACELINE_ELASTIC": "1"}
        np = ["-np", str(workers), "--min-np", str(workers - 1), "--max-np", str(workers)]
        place = ["--listen", self.scheduler, "--num-servers", str(servers)]
        script = [sys.executable, str(SCRIPT), "--epochs", str(epochs)]
        again = ["--elastic", "--blacklist-cooldown-range", "0.5", "0.5"]
        self.command = ["paceline", "run", *np, *again, *place, *script]
        self.servers, self.lines = [], []
        self.places = {}  # pidfds of the workers, by pid: a number may become another process's

    def __enter__(self):
        self.logs = tempfile.TemporaryFile("w+")
        self.launcher = subprocess.Popen(
            self.command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        for _ in range(self.count):
            self.start_server()
        return self

    def __exit__(self, *_):
        for process in [self.launcher, *self.servers]:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
        self.logs.close()

    def _read(self):
        for line in self.launcher.stdout:
            self.lines.append(line)
            if place := PLACE.search(line):
                with contextlib.suppress(ProcessLookupError):  # killed meanwhile
                    if int(place[3]) not in self.places:
                        self.places[int(place[3])] = os.pidfd_open(int(place[3]))

    def start_server(self):
        """Starts one more dedicated server."""
        self.servers.append(subprocess.Popen(
            ["paceline", "server", "--scheduler", self.scheduler, "--listen", "127.0.0.1:0"],
            env=self.environment, stdout=self.logs, stderr=self.logs,
        ))  # fmt: skip

    def training(self):
        """The workers that train, where as many do as the job is to have."""
        for pid, worker in list(self.places.items()):
            if select.select([worker], [], [], 0)[0]:
                del self.places[pid]
                os.close(worker)
        alive = list(self.places.values())
        return alive if len(alive) == self.workers else []

    def kill(self, dice, workers):
        """Kills one of the workers and a server, and starts another server."""
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            signal.pidfd_send_signal(dice.choice(workers), signal.SIGKILL)
        victim = dice.choice(self.servers)
        victim.kill()
        victim.wait()
        self.servers.remove(victim)
        self.start_server()

    def result(self, limit):
        """The accuracy of the training, when it has ended."""
        try:
            code = self.launcher.wait(limit)
        except subprocess.TimeoutExpired:
            code = "none"
        self.reader.join(10)  # forever, if a worker that is left had the launcher's output
        text = "".join(self.lines)
        accuracy = ACCURACY.search(text)
        if code != 0 or not accuracy or "identical on all workers" not in text:
            self.logs.seek(0)
            sys.exit(
                f"the training ended with exit code {code}:\n{text[-4000:]}\nits servers:\n{self.logs.read()[-4000:]}"
            )
        return float(accuracy[1])


def main():
    """Trains twice and compares."""
    parser = argparse.ArgumentParser(description="training while workers and servers are killed, beside one in peace")
    parser.add_argument("--workers", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--servers", type=int, default=3, help="dedicated ones (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2050, help="(default: %(default)s)")
    parser.add_argument("--every", type=float, default=10, help="seconds from loss to loss (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=2, help="percent (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    dice, shown = random.Random(options.seed), []
    for troubled in (False, True):
        began, losses, late = time.monotonic(), 0, 0
        with Job(options.workers, options.servers, options.epochs) as job:
            while troubled and job.launcher.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.launcher.wait(options.every)
                    break
                if workers := job.training():
                    job.kill(dice, workers)
                    losses += 1
                else:
                    late += 1
            accuracy = job.result(3600)
            took = time.monotonic() - began
        shown.append(accuracy)
        what = f"{losses} workers and {losses} servers killed" if troubled else "in peace"
        waited = f", {late} times a new worker was not there yet" if late else ""
        print(f"{what}: {options.epochs} epochs in {took:.0f} s, test accuracy {accuracy:.2f} %{waited}", flush=True)
    if abs(shown[0] - shown[1]) > options.tolerance:
        sys.exit("the accuracies differ")


if __name__ == "__main__":
    main()
