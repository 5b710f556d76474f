"""All-reduce over slow links, one rank on each host, by Paceline and by Gloo in turns: python bench/links.py --help.

The hosts are network namespaces that this script makes and removes, which needs root. bench/README.md says what the
figures mean.
"""

import argparse
import contextlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import shapes
from fleet import Fleet, Way, parse_size, report, show_size, spread, take_turns

sys.path.append(str(Path(__file__).resolve().parents[1] / "python" / "tests"))
import hosts

RESNET50 = "resnet50"
BURST, QUEUE = "128kb", "20ms"  # of the token buckets: two of the kernel's largest segments, a small switch's buffer
STREAM = Path(__file__).with_name("stream.py")


def unavailable():
    """Why this machine cannot have slow links, or None."""
    return hosts.available() or (None if shutil.which("tc") else "links are slowed down by iproute2's tc")


class Hosts(hosts.Hosts):
    """Hosts for the ranks of a Fleet, whose links carry `rate` in each direction.

    ranks, per_host: so many ranks share hosts, so many on each; every other process has a host of its own. rates: of
    the links of some hosts, by number.
    """

    def __init__(self, number, rate, folder, ranks=0, per_host=1, rates=None):
        super().__init__([f"host{i}" for i in range(number)], folder)
        self.rates = rates or {}
        self.rate, self.address = rate, f"{hosts.NETWORK}.1"
        self.ranks, self.per_host = ranks, per_host

    def command(self, host, script):
        """As in the base class; the host may also be a number and the script a list of words."""
        if isinstance(host, int):
            host, script = self.names[self.host_of(host)], "exec " + shlex.join(script)
        return super().command(host, script)

    def host_of(self, process):
        """The number of a process's host, which is that of the first rank on it."""
        return process - process % self.per_host if process < self.ranks else process

    def environment(self, rank, size):
        """The variables that name a rank's host and interface."""
        place = {"LOCAL_RANK": str(rank % self.per_host), "LOCAL_WORLD_SIZE": str(self.per_host)}
        return place | {"GLOO_SOCKET_IFNAME": "eth0", "PACELINE_INTERFACE": "eth0"}

    def _make(self):
        super()._make()
        for number, name in enumerate(self.names, 1):
            rate = self.rates.get(number - 1, self.rate)
            self._limit(self._namespace(name), "eth0", rate)
            self._limit(self._switch, f"port{number}", rate)

    def _limit(self, space, device, rate):
        bucket = f"tbf rate {rate} burst {BURST} latency {QUEUE}"
        command = ["ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, "root", *bucket.split()]
        subprocess.run(command, check=True)


class Streams:
    """Plain TCP from the first host to the last."""

    def __init__(self, where):
        self.where, self.last = where, where.host_of(len(where.names) - 1)

    def __enter__(self):
        command = self.where.command(self.last, [sys.executable, str(STREAM), "listen"])
        self.listener = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = int(self.listener.stdout.readline())
        return self

    def __exit__(self, *_):
        self.listener.kill()
        self.listener.wait()

    def gbit_per_s(self, bytes=64 << 20):
        """The rate of one stream."""
        address = f"{hosts.NETWORK}.{self.last + 1}"
        argv = [sys.executable, str(STREAM), address, str(self.port), str(bytes)]
        subprocess.run(self.where.command(0, argv), check=True)
        seconds, total = self.listener.stdout.readline().split()
        return float(total) * 8e-9 / float(seconds)


def share_of_stream(fleet):
    """The maximum rate of gradients per worker, as a share of a stream's rate.

    With embedded servers each of a host's workers sends to other hosts (n-h)/n of its gradients, where h share a host,
    and its server as much of sums: both on the host's link. Dedicated servers receive and send n gradients on k links,
    each worker one on its own link, or each host one where its workers sum first, which needs servers elsewhere. Gloo's
    ring passes each link once.
    """
    n, per_host = fleet.size, fleet.where.per_host
    if fleet.system == "gloo":
        return n / (2 * (n - 1))
    if fleet.servers:
        alike = per_host if fleet.settings.get("PACELINE_HOST_SUMS") != "0" else 1  # ranks that share one tensor
        return min(alike / per_host, alike * fleet.servers / n)
    return n / (2 * per_host * (n - per_host))


def parse_system(label):
    """The kind of system and the number of workers of dedicated4."""
    kind = label.rstrip("0123456789")
    return kind, int(label.removeprefix(kind))


def main():
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description="All-reduce over slow links, in network namespaces")
    parser.add_argument("--sizes", default="64MiB,256MiB",
                        help=f"bytes of the float32 tensor, or {RESNET50}: its gradients, for Gloo in DDP's buckets "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--rate", default="1gbit", help="of each link in each direction (default: %(default)s)")
    parser.add_argument("--systems", default="embedded2,embedded4,dedicated4,gloo2,gloo4",
                        help="what to compare, with its number of workers (default: %(default)s)")  # fmt: skip
    parser.add_argument("--per-host", type=int, default=1,
                        help="workers on each host, beside as many servers as hosts; all systems then have as many "
                        "workers; plain4 is dedicated4 with PACELINE_HOST_SUMS=0 (default: %(default)s)")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting for Paceline")
    parser.add_argument("--duration", type=float, default=40, help="seconds for each size (default: %(default)s)")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    if why := unavailable():
        print(f"skipped: {why}")
        return
    systems = {label: parse_system(label) for label in options.systems.split(",")}
    if alone := [s for s, (kind, n) in systems.items() if kind in ("embedded", "gloo") and n <= options.per_host]:
        parser.error(f"--systems {alone[0]}: its workers need at least two hosts")
    number = max(2 * n if kind in ("dedicated", "plain") else max(n, 2) for kind, n in systems.values())
    settings = dict(s.split("=", 1) for s in options.set)
    ranks = max(n for _, n in systems.values()) if options.per_host > 1 else 0
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        where = stack.enter_context(Hosts(number, options.rate, folder, ranks, options.per_host))
        streams = stack.enter_context(Streams(where))
        before = streams.gbit_per_s()
        fleets = {}
        for label, (kind, n) in systems.items():
            system = "gloo" if kind == "gloo" else "paceline"
            own = settings | ({"PACELINE_HOST_SUMS": "0"} if kind == "plain" else {})
            servers = n // options.per_host if kind in ("dedicated", "plain") else 0
            fleets[label] = stack.enter_context(Fleet(system, n, where, servers, **own))
        results = []
        for size in options.sizes.split(","):
            if size == RESNET50:
                ways = {label: Way(f, "buckets" if f.system == "gloo" else "tensors") for label, f in fleets.items()}
                bytes, seconds = 4 * sum(shapes.RESNET50), take_turns(ways, options.duration, 1, RESNET50)
            else:
                bytes = parse_size(size)
                seconds = take_turns(fleets, options.duration, 1, "allreduce", bytes=bytes, in_a_row=1)
            shown = show_size(bytes) if size != RESNET50 else "ResNet-50"
            results += [line(fleets[label], label, shown, bytes, values, before) for label, values in seconds.items()]
        after = streams.gbit_per_s()
        print(f"one TCP stream: {before:.3f} Gbit/s before, {after:.3f} after")
        versions = next(iter(fleets.values())).versions
        stream = {"before_gbit_per_s": before, "after_gbit_per_s": after}
        run = {"rate": options.rate, "per_host": options.per_host, "settings": settings, "stream": stream}
        report("links", versions, results, options.json, **run)


def line(fleet, label, exchange, bytes, seconds, stream):
    """Prints and returns the result of one system and one exchange."""
    result = {"system": label, "workers": fleet.size, "dedicated_servers": fleet.servers, "exchange": exchange}
    result |= {"bytes": bytes, "repetitions": len(seconds)} | spread(seconds, "_ms", 1e3)
    result["gbit_per_s"] = bytes * 8e-6 / result["median_ms"]
    result["limit_gbit_per_s"] = stream * share_of_stream(fleet)
    share = result["gbit_per_s"] / result["limit_gbit_per_s"]
    times = f"{result['median_ms']:9.1f} ms ({result['p10_ms']:.1f}-{result['p90_ms']:.1f})"
    rate = f"{result['gbit_per_s']:.3f} Gbit/s of gradient per worker"
    print(f"{exchange:>9} {label:>12} {times:>32}  {rate}, {share:.0%} of the limit", flush=True)
    return result


if __name__ == "__main__":
    main()
