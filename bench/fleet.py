"""Starts the ranks of the compared systems, runs them in turns, and summarises their answers."""

import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

RANK = Path(__file__).with_name("rank.py")
OTHERS = ("PACELINE_", "HOROVOD_", "DMLC_", "BYTEPS_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")


class Loopback:
    """All ranks on this host, over its loopback interface."""

    address = "127.0.0.1"

    def command(self, rank, argv):
        """The command line that runs argv on the rank's host."""
        return argv

    def environment(self, rank, size):
        """The variables that name a rank's host and interface."""
        return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}


class Fleet:
    """The ranks of one system. Use it in a with block, at whose end they end.

    system: "paceline", "gloo" or "horovod" (on this host only). where: Loopback() or links.Hosts. servers: the number
    of dedicated servers of a Paceline job, each on a host after those of the ranks; 0 for embedded ones. script: the
    ranks' program. python: their interpreter, and with it their build of Paceline. settings: further variables.
    """

    def __init__(self, system, size, where, servers=0, script=RANK, python=sys.executable, **settings):
        self.system, self.size, self.where, self.servers, self.settings = system, size, where, servers, settings
        self.script, self.python = script, python
        self.ranks, self.others, self.versions = [], [], {}

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="paceline-bench-")
        try:
            self._start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, failed, *_):
        self._signal(signal.SIGCONT)
        for process in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # it has ended, with a command unread
                process.stdin.close()
        _wait(self.ranks, 1 if failed else 30)
        for process in reversed(self.others):  # servers first: they need the scheduler
            process.terminate()
            _wait([process], 5)
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, what, **arguments):
        """Sends every rank a command and returns all answers."""
        line = json.dumps({"what": what, **arguments}) + "\n"
        self._signal(signal.SIGCONT)
        for rank, process in enumerate(self.ranks):
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                self._ended(rank)
        answers = self._answers()
        self._signal(signal.SIGSTOP)
        return answers

    def _signal(self, number):
        """Stops the ranks between commands, or lets them go on, where they use the CPU while they are idle."""
        if self.system == "horovod":
            for process in self.ranks:
                process.send_signal(number)

    def _start(self):
        port, secret = free_port(), secrets.token_hex(16)
        common = {k: v for k, v in os.environ.items() if not k.startswith(OTHERS)}
        if "PACELINE_LIBRARY" in os.environ and self.python == sys.executable:  # another has its own build
            common["PACELINE_LIBRARY"] = os.environ["PACELINE_LIBRARY"]
        common |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "BENCH_STORE": f"{self.folder}/store"}
        common |= {"PACELINE_JOB_SECRET": secret, "MASTER_ADDR": self.where.address, "PACELINE_PORT": str(port)}
        common |= self.settings
        if self.servers:
            scheduler = f"{self.where.address}:{port}"
            common |= {"PACELINE_SCHEDULER": scheduler, "PACELINE_SERVERS": "dedicated"}
            common |= {"PACELINE_NUM_SERVERS": str(self.servers)}
            self._run_other(0, ["scheduler", "--listen", scheduler], common)
            for i in range(self.servers):
                self._run_other(self.size + i, ["server"], common)
        if self.system == "horovod":
            common |= self._rendezvous(common)
        for rank in range(self.size):
            own = (
                {"RANK": str(rank), "WORLD_SIZE": str(self.size)}
                | self._horovod(rank)
                | self.where.environment(rank, self.size)
            )
            command = self.where.command(rank, [self.python, str(self.script), self.system])
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.ranks.append(subprocess.Popen(command, env=common | own, **pipes))
        self.versions = self._answers()[0]
        self._signal(signal.SIGSTOP)

    def _rendezvous(self, environment):
        """Starts Horovod's rendezvous server, as horovodrun does, and returns the variables that lead to it."""
        argv = [self.python, str(RANK.with_name("rendezvous.py")), str(self.size)]
        server = subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.others.append(server)
        port = server.stdout.readline().strip()
        if not port:
            sys.exit(f"{self.python} has no Horovod that works; what it said is above")
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": self.where.address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }

    def _horovod(self, rank):
        """The variables by which a rank of Horovod finds its place."""
        if self.system != "horovod":
            return {}
        names = {"RANK": rank, "SIZE": self.size, "LOCAL_RANK": rank, "LOCAL_SIZE": self.size}
        names |= {"CROSS_RANK": 0, "CROSS_SIZE": 1, "HOSTNAME": "localhost"}
        return {f"HOROVOD_{name}": str(value) for name, value in names.items()}

    def _run_other(self, place, argv, environment):
        paceline = shutil.which("paceline")
        if not paceline:
            sys.exit("dedicated servers need the command paceline in PATH: run it by `make bench`, or pip install .")
        own = self.where.environment(place, self.size)
        environment = environment | {k: v for k, v in own.items() if k.startswith("PACELINE_")}
        self.others.append(subprocess.Popen(self.where.command(place, [paceline, *argv]), env=environment))

    def _answers(self):
        lines = [process.stdout.readline() for process in self.ranks]
        if not all(lines):
            self._ended(lines.index(""))
        return [json.loads(line) for line in lines]

    def _ended(self, rank):
        sys.exit(f"{self.system}: rank {rank} of {self.size} has ended; what it said is above")


def _wait(processes, seconds):
    """Waits for processes to end, and kills them after a time."""
    for process in processes:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Way:
    """A fleet with one way of doing what it is asked, for take_turns."""

    def __init__(self, fleet, way):
        self.fleet, self.way = fleet, way

    def ask(self, what, **arguments):
        """As Fleet.ask."""
        return self.fleet.ask(what, way=self.way, **arguments)


def take_turns(fleets, duration_s, per_exchange, what, **arguments):
    """As answers_in_turns, but returns the seconds of each repetition, divided by `per_exchange`."""
    answers = answers_in_turns(fleets, duration_s, what, **arguments)
    return {label: slowest(of, per_exchange) for label, of in answers.items()}


def slowest(repetitions, parts):
    """The slowest rank's seconds of each repetition, for one of its parts."""
    return [max(answer["seconds"] for answer in answers) / parts for answers in repetitions]


def answers_in_turns(fleets, duration_s, what, **arguments):
    """Runs a command on the fleets in turns for about `duration_s`, each time in another order.

    Returns, by the fleet's label, all ranks' answers to each repetition.
    """
    for _ in range(2):  # the first use declares, the second warms up
        for fleet in fleets.values():
            fleet.ask(what, **arguments)
    answers = {label: [] for label in fleets}
    orders = itertools.cycle(_orders(list(fleets)))
    began = time.monotonic()
    for i in range(1000):
        if i >= 5 and time.monotonic() - began > duration_s:
            break
        for label in next(orders):
            answers[label].append(fleets[label].ask(what, **arguments))
    return answers


def _orders(labels):
    """Orders, then these backwards: each is at each place once in either half, and each behind each about as often."""
    n = len(labels)
    first = [(k + 1) // 2 * (-1) ** k % n for k in range(n)]
    orders = [[labels[(place + i) % n] for place in first] for i in range(n)]
    return orders + [order[::-1] for order in orders]


def spread(values, unit, factor=1):
    """The median, and the tenth and ninetieth percentiles."""
    values = sorted(v * factor for v in values)
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return {f"median{unit}": statistics.median(values), f"p10{unit}": tenths[0], f"p90{unit}": tenths[8]}


def ratios(of, to):
    """The spread of the ratios of successive repetitions."""
    return spread([a / b for a, b in zip(of, to, strict=True)], "")


def in_a_row(bytes):
    """The number of exchanges in one repetition: small ones are too short to time alone."""
    return min(max((4 << 20) // bytes, 1), 16)


def report(benchmark, versions, results, file, **more):
    """Writes the JSON file, if one is wanted."""
    if not file:
        return
    head = {
        "benchmark": benchmark,
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    head |= {"cores": os.cpu_count(), "versions": versions}
    Path(file).write_text(json.dumps(head | more | {"results": results}, indent=2) + "\n")


def parse_size(text):
    """The number of bytes of 4KiB, 64MiB or a number."""
    for unit, factor in (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)):
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)


def parse_exchange(text):
    """The collective and the bytes of 64KiB, an allreduce, or broadcast:64KiB."""
    kind, _, size = text.rpartition(":")
    return kind or "allreduce", parse_size(size)


def show_size(bytes):
    """The inverse of parse_size."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if bytes % factor == 0:
            return f"{bytes // factor} {unit}"
    return f"{bytes} B"


def free_port():
    """A free TCP port."""
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]
