"""Collectives by Paceline, PyTorch's Gloo and Horovod on this host, side by side: python bench/peers.py --help.

bench/README.md says what the figures mean.
"""

import argparse
import contextlib
from pathlib import Path

import page
from fleet import Fleet, Loopback, Way, in_a_row, parse_exchange, ratios, report, show_size, spread, take_turns

RESNET50, MANY = "resnet50", "500x4kB"
ARENA = "paceline, arena"
COLLECTIVES = ("broadcast", "allgather", "alltoall", "reducescatter")
OTHERS = [f"{kind}:{size}" for kind in COLLECTIVES for size in ("4KiB", "1MiB", "64MiB")]
EXCHANGES = ",".join(["4KiB,64KiB,1MiB,4MiB,16MiB,64MiB,256MiB", RESNET50, MANY, *OTHERS])
BUCKETS = "gloo, 25 MiB buckets"


def main():
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description="Collectives by Paceline and its peers, side by side")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: %(default)s)")
    what = (
        f"bytes of the float32 tensor, behind the collective's name where it is no allreduce, {RESNET50} for its 161 "
        f"gradients, or {MANY} for so many tensors at once (default: %(default)s)"
    )
    parser.add_argument("--sizes", default=EXCHANGES, help=what)
    parser.add_argument("--horovod", metavar="PYTHON", help="interpreter that imports Horovod, which is measured too")
    parser.add_argument("--rounds", type=int, default=1, help="how often the processes start anew")
    parser.add_argument("--duration", type=float, default=8, help="seconds for each exchange (default: %(default)s)")
    parser.add_argument("--idle", type=float, default=5, help="seconds to watch the CPU of idle ranks; 0: not at all")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--chart", type=Path, help="file for a chart of the results (SVG)")
    options = parser.parse_args()
    if options.chart:  # before the time that is measured, not after it
        options.chart.parent.mkdir(parents=True, exist_ok=True)
    results, versions = [], {}
    for ranks in map(int, options.ranks.split(",")):
        rounds = []
        for _ in range(options.rounds):
            seconds, idle, versions = measure(ranks, options)
            rounds.append(seconds)
        columns = f"{'collective':>13} {'exchange':>10} {'way':>22} {'ms':>10} {'p10-p90':>20} {'GB/s':>8}"
        print(f"{ranks} ranks\n{columns}  times Paceline's")
        for what in options.sizes.split(","):
            results.append(summed(ranks, what, [one[what] for one in rounds]))
        if idle:
            print("idle, CPU s of all ranks: " + ", ".join(f"{k} {v:.3f}" for k, v in idle.items()))
            results.append({"ranks": ranks, "idle_seconds": options.idle, "cpu_seconds": idle})
    report("peers", versions, results, options.json)
    if options.chart:
        options.chart.write_text(chart(results))
        print(f"the chart is in {options.chart}")


def measure(ranks, options):
    """One round: seconds by exchange and way; the CPU seconds of idle ranks; versions."""
    with contextlib.ExitStack() as stack:
        fleets = {s: stack.enter_context(Fleet(s, ranks, Loopback())) for s in ("paceline", "gloo")}
        if options.horovod:
            fleets["horovod"] = stack.enter_context(Fleet("horovod", ranks, Loopback(), python=options.horovod))
        seconds = {}
        for what in options.sizes.split(","):
            if what == RESNET50:
                ways = {label: Way(fleet, "tensors") for label, fleet in fleets.items()}
                ways |= {ARENA: Way(fleets["paceline"], "arena"), BUCKETS: Way(fleets["gloo"], "buckets")}
                seconds[what] = take_turns(ways, options.duration, 1, "resnet50")
            elif what == MANY:
                ways = fleets | {ARENA: Way(fleets["paceline"], "arena")}
                seconds[what] = take_turns(ways, options.duration, 1, "many", count=500, bytes=4000)
            else:
                kind, bytes = parse_exchange(what)
                row = in_a_row(bytes)
                ways = fleets | ({ARENA: Way(fleets["paceline"], "arena")} if kind == "allreduce" else {})
                seconds[what] = take_turns(ways, options.duration, row, kind, bytes=bytes, in_a_row=row)
        idle = {label: idle_cpu(fleet, options.idle) for label, fleet in fleets.items()} if options.idle else {}
        return seconds, idle, {label: fleet.versions for label, fleet in fleets.items()}


def idle_cpu(fleet, seconds):
    """CPU seconds of all ranks while they do nothing."""
    return sum(answer["cpu"] for answer in fleet.ask("idle", seconds=seconds))


def summed(ranks, what, rounds):
    """Prints and returns the result of one exchange over all rounds."""
    kind, bytes = ("allreduce", None) if what in (RESNET50, MANY) else parse_exchange(what)
    label = {RESNET50: "ResNet-50", MANY: "500 x 4 kB"}[what] if bytes is None else show_size(bytes)
    result = {"ranks": ranks, "collective": kind, "exchange": label, "bytes": bytes, "rounds": len(rounds), "ways": {}}
    ours = [s for one in rounds for s in one["paceline"]]
    for way in rounds[0]:
        values = [s for one in rounds for s in one[way]]
        one = {"repetitions": len(values)} | spread(values, "_ms", 1e3)
        one["gb_per_s"] = bytes / one["median_ms"] / 1e6 if bytes else None
        one["ratio"] = ratios(values, ours)
        one["ratio"]["rounds"] = sorted(ratios(r[way], r["paceline"])["median"] for r in rounds)
        result["ways"][way] = one
        of = f"{one['p10_ms']:.3f}-{one['p90_ms']:.3f}"
        rate = f"{one['gb_per_s']:.3f}" if bytes else ""
        times = "{median:.2f} ({p10:.2f}-{p90:.2f})".format(**one["ratio"])
        print(f"{kind:>13} {label:>10} {way:>22} {one['median_ms']:>10.3f} {of:>20} {rate:>8}  {times}", flush=True)
    return result


def chart(results):
    """Bars: the time of each way over Paceline's, for each exchange and number of ranks."""
    groups = []
    for result in results:
        if "ways" not in result:
            continue
        what = f"{'one tensor' if result['bytes'] else 'gradients'} of {result['exchange']}"
        ours = f"{result['ways']['paceline']['median_ms']:.3g} ms"
        rows = [(label, way["ratio"]["median"]) for label, way in result["ways"].items()]
        rows.sort(key=lambda row: not row[0].startswith("paceline"))  # ours together
        if result["collective"] != "allreduce":
            what = f"{result['collective']}, {what}"
        title = f"{what}, {result['ranks']} ranks (Paceline: {ours})"
        groups.append((title, rows, "{:.2f}"))
    return page.bars(groups, highlight="paceline")


if __name__ == "__main__":
    main()
