"""Training steps by Paceline, by DDP over Gloo and over Paceline, and computing alone: python bench/step.py --help.

bench/README.md says what the figures mean.
"""

import argparse
import signal
import statistics
import subprocess
from pathlib import Path

from fleet import Fleet, Loopback, Way, answers_in_turns, ratios, report, slowest, spread

WAYS = ("alone", "ddp", "backend", "paceline", "arena")
MODELS = "digits,small,wide,deep,resnet50,bert"
COSTS = ("user", "system", "voluntary", "involuntary")
GARBAGE = ("python_gc", "go_gc", "go_objects")
BLOCK_S = 0.5
PROFILED = 8  # blocks in a profile


def main():
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(
        description="Training steps by Paceline, DDP over Gloo and over Paceline, and computing alone"
    )
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--models", default=MODELS, help="some of: %(default)s")
    parser.add_argument(
        "--work", type=float, default=1, help="examples for which simulated layers compute (default: 1)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often the processes start anew")
    parser.add_argument("--duration", type=float, default=12, help="seconds for each model (default: %(default)s)")
    parser.add_argument("--steps", type=int, help=f"steps of a block (default: as many as take about {BLOCK_S} s)")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="where perf's profiles of rank 0 go")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    results, versions = [], {}
    for ranks in map(int, options.ranks.split(",")):
        rounds = []
        for _ in range(options.rounds):
            answers, versions = measure(ranks, options)
            rounds.append(answers)
        print(heading(ranks))
        for model in options.models.split(","):
            results.append(summed(ranks, model, [one[model] for one in rounds]))
    report("step", versions, results, options.json, work=options.work)


def measure(ranks, options):
    """One round: for each model its size, the steps of a block, and the ranks' answers to each block by way."""
    script = Path(__file__).with_name("step_rank.py")
    found = {}
    with Fleet("paceline", ranks, Loopback(), script=script) as fleet:
        for model in options.models.split(","):
            size = fleet.ask("prepare", model=model, work=options.work, ways=WAYS)[0]
            ways = {way: Way(fleet, way) for way in WAYS}
            fit = fitting(fleet)
            steps = options.steps or fit
            found[model] = size, steps, answers_in_turns(ways, options.duration, "train", steps=steps)
            for way in ways if options.profile else ():
                profile(ways[way], steps, options.profile / f"{model}-{ranks}-{way}.perf")
        return found, fleet.versions


def fitting(fleet):
    """The steps of a block, so that it takes about BLOCK_S. Compares the results of one step of each way."""
    for way in WAYS:
        fleet.ask("train", way=way, steps=1)
    (seconds,) = slowest([fleet.ask("train", way="ddp", steps=2)], 2)
    return max(1, min(round(BLOCK_S / seconds), 50))


def profile(way, steps, file):
    """Writes a profile of rank 0, with the kernel's part where that is allowed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    argv = ["perf", "record", "--quiet", "--freq", "499", "--call-graph", "fp", "--output", file]
    with subprocess.Popen([*argv, "--pid", str(way.fleet.ranks[0].pid)]) as perf:
        for _ in range(PROFILED):
            way.ask("train", steps=steps)
        perf.send_signal(signal.SIGINT)


def summed(ranks, model, rounds):
    """Prints and returns the result of one model over all rounds."""
    size = rounds[0][0]
    result = {"ranks": ranks, "model": model} | size | {"rounds": len(rounds), "ways": {}}
    seconds = {way: [s for _, steps, of in rounds for s in slowest(of[way], steps)] for way in WAYS}
    for way in WAYS:
        answers = [(a, steps) for _, steps, of in rounds for block in of[way] for a in block]
        one = {"blocks": len(seconds[way])} | spread(seconds[way], "_ms", 1e3)
        one["all"], one["training"] = (costs(answers, prefix) for prefix in ("", "thread_"))
        for k in GARBAGE:  # a median for what grows once, where another order of arrivals needs more memory
            mean = statistics.median if k == "go_objects" else statistics.fmean
            one[k] = mean(a[k] / steps for a, steps in answers)
        one["ratio"] = ratios(seconds[way], seconds["ddp"])
        result["ways"][way] = one
        cells = f"{one['median_ms']:>9.2f} {one['p10_ms']:>8.2f}-{one['p90_ms']:<9.2f} {shown(one['all'])}"
        times = "{median:.2f} ({p10:.2f}-{p90:.2f})".format(**one["ratio"])
        of = one["training"]
        own = f"{of['cpu_ms']:>8.2f} {of['voluntary']:>5.0f}+{of['involuntary']:<6.0f}"
        garbage = f"{1e3 * one['python_gc']:>7.0f} {1e3 * one['go_gc']:>5.0f} {one['go_objects']:>7.0f}"
        print(f"{model:>10} {way:>9} {cells} {own} {garbage}  {times}", flush=True)
    return result


def heading(ranks):
    """The table's first two lines."""
    above = f"{ranks} ranks{'':37}a step of one rank: {'all threads':>17} {'training thread':>22} {'garbage':>23}"
    costs = f"{'CPU ms':>8} {'user+system':>13} {'switches':>12} {'CPU ms':>8} {'switches':>12}"
    garbage = f"{'Python':>7} {'Go':>5} {'objects':>7}"
    return f"{above}\n{'model':>10} {'way':>9} {'ms':>9} {'p10-p90':>18} {costs} {garbage}  times DDP's"


def costs(answers, prefix):
    """The median cost of a rank's step, by kind; CPU in milliseconds."""
    one = {k: statistics.median(a[prefix + k] / steps for a, steps in answers) for k in COSTS}
    user, system = 1e3 * one.pop("user"), 1e3 * one.pop("system")
    # Of the sums: Linux shares out a short block's time by ticks, so the medians of each may be of other blocks.
    cpu = statistics.median((a[f"{prefix}user"] + a[f"{prefix}system"]) / steps for a, steps in answers)
    return {"cpu_ms": 1e3 * cpu, "user_ms": user, "system_ms": system} | one


def shown(of):
    """The cells of a rank's costs."""
    cpu = f"{of['user_ms']:.1f}+{of['system_ms']:.1f}"
    return f"{of['cpu_ms']:>8.2f} {cpu:>13} {of['voluntary']:>5.0f}+{of['involuntary']:<6.0f}"


if __name__ == "__main__":
    main()
