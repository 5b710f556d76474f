"""Placements over slow links: exchanges of a model's gradients, in turns under each: python bench/placement.py --help.

Workers and dedicated servers are on hosts of their own: network namespaces that this script makes and removes, which
needs root. bench/README.md says what the figures mean.
"""

import argparse
import contextlib
import tempfile

import shapes
from fleet import Fleet, report, spread, take_turns
from links import Hosts, Streams, unavailable


def main():
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description="Placements over slow links, in network namespaces")
    parser.add_argument(
        "--placements", default="largest-first,round-robin,mxnet,tensorflow", help="default: %(default)s"
    )
    parser.add_argument("--models", help="some of those that `paceline bench shapes` lists (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--servers", type=int, default=3, help="dedicated ones (default: %(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of each link in each direction (default: %(default)s)")
    parser.add_argument("--straggler", metavar="RATE", help="of the first server's link; keys may leave it")
    parser.add_argument("--settle", type=float, default=0, help="seconds before the measurement (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting for Paceline")
    parser.add_argument("--duration", type=float, default=30, help="seconds for each model (default: %(default)s)")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    models = options.models.split(",") if options.models else list(shapes.gradients())
    if unknown := [m for m in models if m not in shapes.gradients()]:
        parser.error(f"--models {unknown[0]!r}: allowed are {', '.join(shapes.gradients())}")
    if why := unavailable():
        print(f"skipped: {why}")
        return
    settings = dict(s.split("=", 1) for s in options.set)
    workers, servers = options.workers, options.servers
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        rates = {}
        if options.straggler:  # keys move in elastic jobs
            rates = {workers: options.straggler}
            settings = {"PACELINE_ELASTIC": "1", "PACELINE_PLACEMENT_PERIOD": "1s"} | settings
        where = stack.enter_context(Hosts(max(2, workers + servers), options.rate, folder, rates=rates))
        streams = stack.enter_context(Streams(where))
        before = streams.gbit_per_s()
        fleets = {
            name: stack.enter_context(Fleet("paceline", workers, where, servers, PACELINE_PLACEMENT=name, **settings))
            for name in options.placements.split(",")
        }
        results = []
        for model in models:
            if options.settle:
                take_turns(fleets, options.settle, 1, "gradients", model=model)
            seconds = take_turns(fleets, options.duration, 1, "gradients", model=model)
            results += [line(model, name, options, values, before) for name, values in seconds.items()]
        after = streams.gbit_per_s()
        print(f"one TCP stream: {before:.3f} Gbit/s before, {after:.3f} after")
        stream = {"before_gbit_per_s": before, "after_gbit_per_s": after}
        versions = next(iter(fleets.values())).versions
        report("placement", versions, results, options.json, rate=options.rate, straggler=options.straggler,
               workers=workers, servers=servers, settings=settings, stream=stream)  # fmt: skip


def line(model, placement, options, seconds, stream):
    """Prints and returns the result of one placement of one model."""
    bytes = 4 * sum(shapes.gradients()[model])
    result = {"model": model, "placement": placement, "bytes": bytes, "repetitions": len(seconds)}
    result |= spread(seconds, "_ms", 1e3)
    result["bound_ms"] = bytes * max(1, options.workers / options.servers) * 8e-6 / stream
    times = f"{result['median_ms']:9.1f} ms ({result['p10_ms']:.1f}-{result['p90_ms']:.1f})"
    bound = f"{result['median_ms'] / result['bound_ms']:.2f} of the links' {result['bound_ms']:.1f} ms"
    print(f"{model:>12} {placement:>15} {times:>32}  {bound}, {len(seconds)} times", flush=True)
    return result


if __name__ == "__main__":
    main()
