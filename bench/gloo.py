"""All-reduce by Paceline and by torch.distributed's Gloo on this host, side by side: python bench/gloo.py --help.

bench/README.md says what the figures mean.
"""

import argparse

from fleet import Fleet, Loopback, in_a_row, parse_size, ratios, report, show_size, spread, take_turns

SIZES = "4KiB,64KiB,1MiB,4MiB,16MiB,64MiB,256MiB"


def main():
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description="All-reduce by Paceline and by Gloo, side by side")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--sizes", default=SIZES, help="bytes of the float32 tensor (default: %(default)s)")
    parser.add_argument("--shape", choices=["resnet50"], help="instead: the 161 gradients of ResNet-50")
    parser.add_argument("--duration", type=float, default=8, help="seconds for each line (default: %(default)s)")
    parser.add_argument("--idle", type=float, default=5, help="seconds to watch the CPU of idle ranks; 0: not at all")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    results, versions = [], {}
    for ranks in map(int, options.ranks.split(",")):
        print(f"{ranks} ranks")
        with Fleet("paceline", ranks, Loopback()) as paceline, Fleet("gloo", ranks, Loopback()) as gloo:
            versions = paceline.versions
            fleets = {"paceline": paceline, "gloo": gloo}
            if options.shape:
                results += resnet50(fleets, options.duration)
            else:
                results += sizes(fleets, options)
            if options.idle:
                results.append(idle(fleets, options.idle))
    report("gloo", versions, results, options.json)


def sizes(fleets, options):
    """A line and a result for each size."""
    head = ("paceline ms", "p10-p90", "GB/s", "gloo ms", "p10-p90", "GB/s", "gloo/paceline", "p10-p90")
    print(f"{'bytes':>8}" + "".join(f"{h:>16}" for h in head))
    for bytes in map(parse_size, options.sizes.split(",")):
        row = in_a_row(bytes)
        seconds = take_turns(fleets, options.duration, row, "allreduce", bytes=bytes, in_a_row=row)
        result = {"ranks": fleets["gloo"].size, "bytes": bytes, "in_a_row": row, "repetitions": len(seconds["gloo"])}
        for label, values in seconds.items():
            result[label] = spread(values, "_ms", 1e3)
            result[label]["gb_per_s"] = bytes / result[label]["median_ms"] / 1e6
        result["ratio"] = ratios(seconds["gloo"], seconds["paceline"])
        cells = []
        for one in (result["paceline"], result["gloo"]):
            cells += [f"{one['median_ms']:.3f}", f"{one['p10_ms']:.3f}-{one['p90_ms']:.3f}", f"{one['gb_per_s']:.3f}"]
        cells += [f"{result['ratio']['median']:.2f}", f"{result['ratio']['p10']:.2f}-{result['ratio']['p90']:.2f}"]
        print(f"{show_size(bytes):>8}" + "".join(f"{c:>16}" for c in cells), flush=True)
        yield result


def resnet50(fleets, duration):
    """Each tensor by itself with both systems, and DDP's buckets of 25 MiB with Gloo."""
    ways = {
        "paceline, each tensor": Way(fleets["paceline"], "tensors"),
        "gloo, each tensor": Way(fleets["gloo"], "tensors"),
        "gloo, 25 MiB buckets": Way(fleets["gloo"], "buckets"),
    }
    seconds = take_turns(ways, duration, 1, "resnet50")
    ours = seconds["paceline, each tensor"]
    for label, values in seconds.items():
        result = {"ranks": fleets["gloo"].size, "shape": "resnet50", "way": label, "repetitions": len(values)}
        result |= spread(values, "_ms", 1e3) | {"ratio": ratios(values, ours)}
        of, times = f"{result['p10_ms']:.1f}-{result['p90_ms']:.1f}", f"{result['ratio']['median']:.2f}"
        print(f"{label:>24} {result['median_ms']:10.1f} ms  ({of})  {times} times Paceline's", flush=True)
        yield result


class Way:
    """A fleet with one way of exchanging the gradients, for take_turns."""

    def __init__(self, fleet, way):
        self.fleet, self.way = fleet, way

    def ask(self, what):
        """As Fleet.ask."""
        return self.fleet.ask(what, way=self.way)

    def seconds(self, what):
        """As Fleet.seconds."""
        return self.fleet.seconds(what, way=self.way)


def idle(fleets, seconds):
    """CPU time of the ranks while they do nothing."""
    used = {}
    for label, fleet in fleets.items():
        used[label] = sum(answer["cpu"] for answer in fleet.ask("idle", seconds=seconds))
    print(f"idle for {seconds:g} s, CPU s of all ranks: " + ", ".join(f"{k} {v:.3f}" for k, v in used.items()))
    return {"ranks": fleets["gloo"].size, "idle_seconds": seconds, "cpu_seconds": used}


if __name__ == "__main__":
    main()
