"""Two builds of Paceline side by side: python bench/builds.py --other /path/to/another/.venv/bin/python.

The other build is the paceline that this interpreter imports; with --set instead, it is this one without those
settings. Both run bench/rank.py of this tree, in turns, in several rounds of fresh processes. bench/README.md says what
the figures mean.
"""

import argparse
import statistics
import sys

from fleet import Fleet, Loopback, in_a_row, parse_exchange, ratios, report, show_size, spread, take_turns


def main():
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description="Two builds of Paceline, side by side")
    parser.add_argument("--other", default=sys.executable, help="Python interpreter that has the other build")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting for this one only")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: %(default)s)")
    what = "bytes of the float32 tensor, behind the collective's name where it is no allreduce (default: %(default)s)"
    parser.add_argument("--sizes", default="4KiB,1MiB,64MiB", help=what)
    parser.add_argument("--duration", type=float, default=5, help="seconds for each line (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often the processes start anew (default: %(default)s)"
    )
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    what = {}
    for kind, bytes in map(parse_exchange, options.sizes.split(",")):
        row = in_a_row(bytes)
        label = show_size(bytes) if kind == "allreduce" else f"{kind} {show_size(bytes)}"
        what[label] = row, kind, {"bytes": bytes, "in_a_row": row}
    what["ResNet-50"] = 1, "resnet50", {"way": "tensors"}
    head = ("this ms", "p10-p90", "other ms", "p10-p90", "this/other", "rounds' medians")
    print(f"{'ranks':>5} {'exchange':>20}" + "".join(f"{h:>18}" for h in head))
    results = []
    for ranks in map(int, options.ranks.split(",")):
        rounds = [measure(ranks, what, options) for _ in range(options.rounds)]
        for label in what:
            results.append(summed(ranks, label, [one[label] for one in rounds]))
    report("builds", {}, results, options.json)


def measure(ranks, what, options):
    """One round: the seconds of each build, by exchange."""
    other = Fleet("paceline", ranks, Loopback(), python=options.other)
    with Fleet("paceline", ranks, Loopback(), **dict(one.split("=", 1) for one in options.set)) as this, other:
        fleets = {"this": this, "other": other}
        return {
            label: take_turns(fleets, options.duration, row, command, **arguments)
            for label, (row, command, arguments) in what.items()
        }


def summed(ranks, label, rounds):
    """Prints and returns the result of all rounds."""
    result = {"ranks": ranks, "exchange": label, "rounds": len(rounds)}
    for build in ("this", "other"):
        result[build] = spread([s for one in rounds for s in one[build]], "_ms", 1e3)
    result["ratio"] = statistics.median(r for one in rounds for r in pairs(one))
    result["ratios"] = sorted(ratios(one["this"], one["other"])["median"] for one in rounds)
    cells = []
    for build in ("this", "other"):
        one = result[build]
        cells += [f"{one['median_ms']:.3f}", f"{one['p10_ms']:.3f}-{one['p90_ms']:.3f}"]
    cells += [f"{result['ratio']:.3f}", f"{result['ratios'][0]:.3f}-{result['ratios'][-1]:.3f}"]
    print(f"{ranks:>5} {label:>20}" + "".join(f"{c:>18}" for c in cells), flush=True)
    return result


def pairs(one):
    """The ratios of successive repetitions."""
    return [a / b for a, b in zip(one["this"], one["other"], strict=True)]


if __name__ == "__main__":
    main()
