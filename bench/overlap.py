"""Training steps of ResNet-50's shape over slow links, one rank on each host: python bench/overlap.py --help.

The ranks compute elsewhere: their processors sleep meanwhile. The hosts are network namespaces that this script makes
and removes, which needs root. bench/README.md says what the figures mean.
"""

import argparse
import contextlib
import statistics
import tempfile
from pathlib import Path

from fleet import Fleet, Way, answers_in_turns, report, slowest, spread
from links import Hosts, unavailable

WAYS = ("alone", "exchange", "ddp", "paceline", "cross")
SETTLED = 2  # steps after which each of cross_barrier finds as much of the one before in flight
SHOWN = {"alone": "computing", "exchange": "exchange", "ddp": "DDP over Gloo", "paceline": "Paceline",
         "cross": "cross_barrier"}  # fmt: skip


def main():
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description="Training steps of ResNet-50's shape over slow links")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of each link in each direction (default: %(default)s)")
    parser.add_argument(
        "--computing", default="0.5,1,2", help="seconds of computing for each of the exchange (default: %(default)s)"
    )
    parser.add_argument("--model", default="resnet50 elsewhere", help="one of networks.py (default: %(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of: %(default)s; the first two always")
    parser.add_argument("--steps", type=int, default=5, help="of a block (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting for Paceline")
    parser.add_argument("--duration", type=float, default=60, help="seconds for each line (default: %(default)s)")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    if why := unavailable():
        print(f"skipped: {why}")
        return
    results, versions = [], {}
    for ranks in map(int, options.ranks.split(",")):
        print(f"{ranks} ranks, {options.rate}: ms a step (10 % to 90 %), times the longer of computing and exchange")
        with contextlib.ExitStack() as stack:
            where = stack.enter_context(Hosts(ranks, options.rate, stack.enter_context(tempfile.TemporaryDirectory())))
            settings = dict(s.split("=", 1) for s in options.set)
            script = Path(__file__).with_name("step_rank.py")
            fleet = stack.enter_context(Fleet("paceline", ranks, where, script=script, **settings))
            exchange_s = exchange(fleet, options.model)
            for share in map(float, options.computing.split(",")):
                results.append(measure(fleet, ranks, share, exchange_s, options))
            versions = fleet.versions
    report("overlap", versions, results, options.json, model=options.model, rate=options.rate)


def exchange(fleet, model):
    """Seconds of a step without computing."""
    fleet.ask("prepare", model=model, work=0, ways=("exchange",))
    return statistics.median(slowest([fleet.ask("train", way="exchange", steps=2) for _ in range(4)][1:], 2))


def measure(fleet, ranks, share, exchange_s, options):
    """Prints and returns the result for a share of computing."""
    chosen = [*WAYS[:2], *(way for way in WAYS[2:] if way in options.ways.split(","))]
    fleet.ask("prepare", model=options.model, work=share * exchange_s, ways=chosen)
    ways = {way: Way(fleet, way) for way in chosen}
    answers = answers_in_turns(ways, options.duration, "train", steps=options.steps, before=SETTLED)
    seconds = {way: slowest(of, options.steps) for way, of in answers.items()}
    bound = max(statistics.median(seconds["alone"]), statistics.median(seconds["exchange"]))
    result = {"ranks": ranks, "computing": share, "bound_ms": 1e3 * bound, "ways": {}}
    print(f"computing {share:g} times the exchange:")
    for way in chosen:
        one = {"blocks": len(seconds[way])} | spread(seconds[way], "_ms", 1e3)
        one["of_bound"] = one["median_ms"] / result["bound_ms"]
        result["ways"][way] = one
        times = f"{one['median_ms']:9.1f} ({one['p10_ms']:.1f}-{one['p90_ms']:.1f})"
        print(f"{SHOWN[way]:>16} {times:<30} {one['of_bound']:.2f}", flush=True)
    return result


if __name__ == "__main__":
    main()
