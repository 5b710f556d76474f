"""The benchmarks run, check their results, and write what bench/README.md says. Speeds are not checked."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import hosts
import pytest
from jobs import HANG_S

BENCH = Path(__file__).resolve().parents[2] / "bench"


def run(argv, file):
    """The command's output and its JSON file. Checks that no network namespace remains."""
    argv = [*map(str, argv), f"--json={file}"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        printed, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, printed + errors
    assert not list(NAMESPACES.glob(f"paceline-{process.pid}-*"))
    return printed, json.loads(file.read_text())


NAMESPACES = Path("/run/netns")


@pytest.mark.skipif(bool(hosts.available()), reason=str(hosts.available()))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("script", ["links.py", "overlap.py"])
def test_a_benchmark_that_is_told_to_end_leaves_no_namespace(script, number):
    with subprocess.Popen([sys.executable, BENCH / script], stdout=subprocess.PIPE, text=True) as process:
        begun = time.monotonic()
        while not list(NAMESPACES.glob(f"paceline-{process.pid}-host*")):
            assert process.poll() is None and time.monotonic() - begun < HANG_S, "no namespace"
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(HANG_S) == 128 + number
    assert not list(NAMESPACES.glob(f"paceline-{process.pid}-*"))
    assert not list(Path("/etc/netns").glob(f"paceline-{process.pid}-*"))


def check_times(times):
    assert 0 < times["p10_ms"] <= times["median_ms"] <= times["p90_ms"]


def test_allreduce_beside_gloo(tmp_path):
    argv = [sys.executable, BENCH / "peers.py", "--ranks", "2", "--sizes", "4KiB,300000,resnet50,500x4kB"]
    argv += ["--duration", "0.2", "--idle", "0.1", "--chart", tmp_path / "new" / "chart.svg"]
    printed, report = run(argv, tmp_path / "peers.json")
    assert "4 KiB" in printed and f"the chart is in {tmp_path / 'new' / 'chart.svg'}" in printed
    small, odd, resnet50, many, idle = report["results"]
    assert (small["bytes"], odd["bytes"], resnet50["bytes"], small["ranks"]) == (4096, 300000, None, 2)
    for result in (small, odd):
        assert set(result["ways"]) == {"paceline", "paceline, arena", "gloo"}
    assert set(resnet50["ways"]) == {"paceline", "paceline, arena", "gloo", "gloo, 25 MiB buckets"}
    assert set(many["ways"]) == {"paceline", "paceline, arena", "gloo"}
    for result in (small, odd, resnet50, many):
        for way in result["ways"].values():
            assert way["repetitions"] >= 5
            check_times(way)
            assert way["ratio"]["p10"] <= way["ratio"]["median"] <= way["ratio"]["p90"]
            assert len(way["ratio"]["rounds"]) == 1
    assert set(idle["cpu_seconds"]) == {"paceline", "gloo"}
    bars = (tmp_path / "new" / "chart.svg").read_text().count("<rect")
    assert bars == 1 + 3 + 3 + 4 + 3  # the background, a bar for each way


@pytest.mark.parametrize("kind", ["allreduce", "broadcast", "allgather", "alltoall", "reducescatter"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_part_in_the_place_of_another_ends_the_benchmark(monkeypatch, size, kind):
    monkeypatch.syspath_prepend(str(BENCH))
    import rank
    import torch

    def whole(values):
        return values.repeat(elements // values.numel() + 1)[:elements]

    class System:
        """All results as they must be, or with parts in the places of others: the next rank's, or the next part."""

        rank, wrong = 1, 0

        def __init__(self):
            self.size = size

        def barrier(self):
            pass

        def parts(self, values):
            return list(whole(values).chunk(size))

        def sum(self, tensor, name):
            tensor.copy_(torch.cat(self.parts(measured.sum)).roll(self.wrong * elements // size))

        def broadcast(self, tensor, name):
            return whole(measured.every[self.wrong])

        def allgather(self, tensor, name):
            parts = [whole(e)[: elements // size] for e in measured.every]
            return torch.cat(parts[self.wrong :] + parts[: self.wrong])

        def alltoall(self, tensor, name):
            return torch.cat([self.parts(e)[self.rank - self.wrong] for e in measured.every])

        def reducescatter(self, tensor, name):
            return self.parts(measured.sum)[self.rank - self.wrong]

    elements = size << 14
    measured = rank.Rank(System())
    assert getattr(measured, kind)(4 * elements, 1)["seconds"] >= 0
    System.wrong = 1
    with pytest.raises(SystemExit, match=r"rank 1: .* wrong"):
        getattr(measured, kind)(4 * elements, 1)


def test_tensors_of_an_exchange_differ(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import rank

    class System:
        """One rank, whose second tensor comes back as the first."""

        rank, size = 0, 1

        def barrier(self):
            pass

        def sums(self, tensors, name):
            tensors[1].copy_(tensors[0])

    with pytest.raises(SystemExit, match="tensor 1 of 1000 elements has a wrong sum"):
        rank.Rank(System()).many(count=2, bytes=4000)


@pytest.mark.parametrize("ways", range(1, 7))
def test_each_way_is_at_each_place_equally_often(monkeypatch, ways):
    monkeypatch.syspath_prepend(str(BENCH))
    import fleet

    said = []

    class Recorder:
        def __init__(self, label):
            self.label = label

        def ask(self, what):
            said.append(self.label)

    rounds = 2 * ways * 3
    monkeypatch.setattr(fleet, "time", types.SimpleNamespace(monotonic=lambda: len(said)))
    fleet.answers_in_turns({label: Recorder(label) for label in range(ways)}, rounds * ways - 1, "exchange")
    measured = said[2 * ways :]
    assert len(measured) == rounds * ways
    for place in range(ways):
        assert [measured[place::ways].count(label) for label in range(ways)] == [rounds // ways] * ways
    assert set(measured[: 5 * ways : ways]) == set(range(min(ways, 5)))  # the least that is measured


def test_a_rank_that_dies_between_two_commands_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCH))
    import fleet

    script = tmp_path / "rank.py"
    script.write_text('import os, sys\nprint("{}", flush=True)\nos.environ["RANK"] == "1" or sys.stdin.read()\n')
    with (
        pytest.raises(SystemExit, match="rank 1 of 3 has ended"),
        fleet.Fleet("gloo", 3, fleet.Loopback(), script=script) as ranks,
    ):
        ranks.others.append(subprocess.Popen(["sleep", str(HANG_S)]))
        ranks.ranks[1].wait(HANG_S)
        ranks.ask("exchange")
    assert all(process.poll() is not None for process in ranks.ranks + ranks.others)
    assert not Path(ranks.folder).exists()


def test_the_library_is_for_the_build_of_this_interpreter(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PACELINE_LIBRARY", "build/libpaceline.so")
    import fleet

    script, other = tmp_path / "rank.py", tmp_path / "python"
    script.write_text('import json, os\nprint(json.dumps({"library": os.environ.get("PACELINE_LIBRARY")}))\n')
    other.symlink_to(sys.executable)
    for python, library in ((sys.executable, "build/libpaceline.so"), (str(other), None)):
        with fleet.Fleet("paceline", 1, fleet.Loopback(), script=script, python=python) as ranks:
            assert ranks.versions == {"library": library}


@pytest.mark.parametrize("rank", [0, 1])
def test_messages_that_do_not_come_or_come_twice_end_the_benchmark(monkeypatch, rank):
    monkeypatch.syspath_prepend(str(BENCH))
    import messages

    def turn(tensor, there, rank):
        for message in itertools.islice(come, 1):
            there.copy_(message)

    monkeypatch.setattr(messages.dist, "barrier", lambda: None)
    monkeypatch.setattr(messages, "paceline_turn", turn)
    monkeypatch.setattr(messages, "gloo_turn", turn)
    others = messages.contents(200, 1 << 10, 1 - rank)
    come = itertools.cycle(others)
    assert messages.measure(1 << 10, 2, rank)["bytes"] == 1 << 10
    come = itertools.cycle([others[0], *others[:-1]])
    with pytest.raises(RuntimeError, match="brings other bytes"):
        messages.measure(1 << 10, 2, rank)
    come = iter(())
    with pytest.raises(RuntimeError, match="brings other bytes"):
        messages.measure(1 << 10, 2, rank)


def test_make_bench_ends_with_a_chart():
    """The README's own is another, which only make chart changes."""
    dry = subprocess.run(["make", "-n", "bench"], cwd=BENCH.parent, capture_output=True, text=True, check=True)
    assert "bench/peers.py" in dry.stdout and "--chart build/bench.svg" in dry.stdout


def test_training_steps_beside_ddp(tmp_path):
    argv = [sys.executable, BENCH / "step.py", "--ranks", "2", "--models", "digits,stage"]
    argv += ["--duration", "0.1", "--steps", "2", "--work", "0.01"]
    printed, report = run(argv, tmp_path / "step.json")
    digits, stage = report["results"]
    assert (digits["tensors"], digits["parameters"]) == (8, 71_754)
    assert (stage["tensors"], stage["parameters"]) == (33, 225_344)
    for result in (digits, stage):
        assert printed.count(f" {result['model']} ") == len(result["ways"]) == 5
        for way in result["ways"].values():
            assert way["blocks"] >= 5
            check_times(way)
            assert 0 < way["training"]["cpu_ms"] <= way["all"]["cpu_ms"]
            assert way["all"]["voluntary"] >= way["training"]["voluntary"] >= 0
            assert 0 <= way["go_gc"] < 10 and 0 <= way["python_gc"] < 10
        assert result["ways"]["ddp"]["ratio"]["median"] == 1
        assert 0 <= result["ways"]["paceline"]["go_objects"] < 10 * result["tensors"]


@pytest.mark.skipif(hosts.available() is not None, reason=str(hosts.available()))
def test_placements_over_slow_links(tmp_path):
    argv = [sys.executable, BENCH / "placement.py", "--placements", "largest-first,mxnet", "--models", "googlenet"]
    printed, report = run([*argv, "--servers", "2", "--duration", "0.1"], tmp_path / "placement.json")
    assert (report["workers"], report["servers"]) == (2, 2)
    assert [result["placement"] for result in report["results"]] == ["largest-first", "mxnet"]
    for result in report["results"]:
        assert (result["model"], result["bytes"]) == ("googlenet", 4 * 6_998_552)
        check_times(result)
        assert result["placement"] in printed


@pytest.mark.skipif(hosts.available() is not None, reason=str(hosts.available()))
def test_training_steps_over_slow_links(tmp_path):
    argv = [sys.executable, BENCH / "overlap.py", "--ranks", "2", "--model", "digits", "--computing", "0.5"]
    printed, report = run([*argv, "--duration", "0.1", "--steps", "2"], tmp_path / "overlap.json")
    (result,) = report["results"]
    assert (result["ranks"], result["computing"]) == (2, 0.5)
    ways = result["ways"]
    assert set(ways) == {"alone", "exchange", "ddp", "paceline", "cross"}
    assert result["bound_ms"] == max(ways["alone"]["median_ms"], ways["exchange"]["median_ms"])
    for way in ways.values():
        check_times(way)
        assert way["of_bound"] == pytest.approx(way["median_ms"] / result["bound_ms"])
    assert printed.count("DDP over Gloo") == printed.count("cross_barrier") == 1


def test_the_overhead_of_a_framework(tmp_path):
    argv = ["paceline", "run", "-np", "2", sys.executable, BENCH / "overhead.py", "torch"]
    printed, report = run([*argv, "--operations", "64", "--rounds", "1"], tmp_path / "overhead.json")
    assert "torch, 2 ranks, 1024 elements" in printed
    assert set(report) == {"C interface", "addition", "allreduce_async_ and synchronize"}
    assert all(us > 0 for way in report.values() for us in way.values())


def test_a_wrong_average_ends_the_benchmark_of_a_frameworks_overhead(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import numpy as np
    import overhead

    monkeypatch.setattr(overhead, "size", lambda: 2)
    monkeypatch.setattr(overhead, "rank", lambda: 0)
    averages = np.full((2, 8), 1.5, np.float32)
    overhead.check("C interface", averages)
    with pytest.raises(SystemExit, match="rank 0: C interface has a wrong result"):
        overhead.check("C interface", averages)  # where nothing is exchanged


def test_a_barrier_that_fails_ends_the_benchmark_of_a_frameworks_overhead(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import overhead

    class Engine:
        def submit_into(self, op, count, handles):
            pass

        def wait(self, handles):
            return RuntimeError("rank 1 has ended")

        def release(self, handles):
            pass

    monkeypatch.setattr(overhead, "engine", Engine())
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        overhead.barrier()


def test_a_step_that_differs_from_the_other_ways_ends_the_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import step_rank
    import torch

    rank = step_rank.Rank(rank=0)
    rank.prepare("digits", 1, ways=("alone",))
    rank.check("ddp", 2)
    rank.check("paceline", 2)
    with torch.no_grad():
        rank.parameters[3].flatten()[7] += 0.1
    with pytest.raises(SystemExit, match=r"rank 0: paceline ends 1 of 2 steps' way from"):
        rank.check("paceline", 2)


def test_shapes_of_published_models(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import shapes

    assert (len(shapes.RESNET50), sum(shapes.RESNET50)) == (161, 25_557_032)
    bert = [n for elements, _ in shapes.BERT_BASE_LAYERS for n in elements]
    assert (len(bert), sum(bert)) == (199, 109_482_240)
    assert sorted(i for b in shapes.buckets(shapes.RESNET50, 1 << 20) for i in b) == list(range(161))


def test_synchronisation_models_with_a_slow_worker(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- models:begin -->\nold\n<!-- models:end -->\nbelow\n")
    argv = [
        sys.executable,
        BENCH / "models.py",
        "--workers",
        "2",
        "--work",
        "4",
        "--models",
        "SSP(1)",
        "DropStragglers({others})",
    ]
    argv += ["--iterations", "12", "--accuracy", "0.01", "--seeds", "2", "--page", page]
    printed, report = run(argv, tmp_path / "models.json")
    ssp, drop = report["results"]
    assert (ssp["model"], drop["model"]) == ("SSP(1)", "DropStragglers(1)")
    for result in (ssp, drop):
        assert result["reached_s"]["min"] > 0 <= result["rank_0_s"]["max"]
        assert result["reached_iterations"]["median"] in (5, 10, 12)
        assert 0 < result["accuracy"]["median"] <= 1
        assert [r["seed"] for r in result["runs"]] == [0, 1]
    assert ssp["lead"]["max"] <= 1 and ssp["dropped"]["max"] == 0
    assert all(run["delayed"] + run["dropped"] == pytest.approx(24) for run in drop["runs"])
    head, _, *rows = printed.splitlines()
    assert {line.count("|") for line in (head, *rows[:2])} == {head.count("|")}
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text
    assert head in text and rows[0] in text
    assert (tmp_path / "results" / "models.svg").read_text().count("<rect") == 3


@pytest.mark.skipif(hosts.available() is not None, reason=str(hosts.available()))
def test_codecs_over_slow_links(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- compression:begin -->\nstale\n<!-- compression:end -->\nbelow\n")
    argv = [sys.executable, BENCH / "compression.py", "--workers", "2", "--seeds", "1"]
    argv += ["--codecs", "none", "fp16", "topk:0.01 SSP(5) wait-free"]
    argv += ["--iterations", "30", "--timed", "10", "--accuracy", "0.01", "--page", page]
    printed, report = run(argv, tmp_path / "compression.json")
    found = {(r["model"], r["rate"], r["setting"]): r for r in report["results"]}
    assert len(found) == 2 * 2 * 4
    for model, parameters in (("digits", 71_754), ("resnet", 481_190)):
        assert report["models"][model]["parameters"] == parameters
        for rate in ("1gbit", "100mbit"):
            alone, plain, half = (found[model, rate, setting] for setting in ("alone", "none", "fp16"))
            few = found[model, rate, "topk:0.01 SSP(5) wait-free"]
            assert [r["seed"] for r in plain["runs"]] == [0]
            assert alone["sent_mb"]["max"] < 0.01
            # A worker sends half of its gradient, and as a server half of the sum, and headers, the more the slower.
            assert plain["sent_mb"]["median"] == pytest.approx(parameters * 4e-6, rel=0.2)
            assert half["sent_mb"]["median"] == pytest.approx(parameters * 2e-6, rel=0.2)
            assert few["sent_mb"]["median"] < 0.2 * plain["sent_mb"]["median"]
            for result in (plain, half):
                assert 0 < result["accuracy"]["median"] <= 1
                assert result["reached_iterations"]["median"] == (5 if model == "digits" else 10)
                assert result["reached_s"]["min"] > 0
        for composed in found[model, "100mbit", "none"]["runs"]:
            pace = composed["iteration_ms"] / 1e3
            assert composed["reached_s"] == pytest.approx(composed["reached_iterations"] * pace)
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "stale" not in text
    tables = [part for part in printed.split("## ") if "| `fp16` |" in part]
    assert len(tables) == 4 and all(part.split("\n\n")[1] in text for part in tables)
    assert (tmp_path / "results" / "compression.svg").read_text().count("<rect") == 1 + 4 * 3
    assert text.count(", `topk:0.01 SSP(5) wait-free`: the work of") == 4


def test_the_accuracy_is_reached_when_three_in_a_row_say_so(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import compression

    def after(*shares):
        return compression.reached(list(enumerate(shares, 1)), 0.9)

    assert after(0.8, 0.99, 0.8, 0.8) is None  # one good evaluation
    assert after(0.8, 0.88, 0.9, 0.93, 0.5) == 2
    assert after(0.95, 0.95) is None


@pytest.mark.parametrize(
    "servers", [[], ["--servers", "dedicated", "--num-servers", "1"]], ids=["embedded", "dedicated"]
)
def test_the_command(tmp_path, servers):
    argv = [
        "paceline",
        "bench",
        "allreduce",
        "--ranks",
        "2",
        "--sizes",
        "4KiB,300000",
        "--duration",
        "100ms",
        "--idle",
        "100ms",
    ]
    printed, report = run([*argv, *servers], tmp_path / "allreduce.json")
    assert "2 ranks, float32" in printed
    (result,) = report["results"]
    assert [row["bytes"] for row in result["rows"]] == [4096, 300000]
    assert result["num_servers"] == len(servers) // 4
    assert result["idle"]["cpu_seconds"] >= 0
    for row in result["rows"]:
        check_times(row)


def test_one_server_with_many_workers(tmp_path):
    argv = ["paceline", "bench", "scale", "-np", "3,8", "--tensors", "1,4", "--duration", "100ms"]
    _, report = run(argv, tmp_path / "scale.json")
    assert [result["workers"] for result in report["results"]] == [3, 8]
    for result in report["results"]:
        assert result["server_bytes"]["alone"] > 1 << 20
        assert [row["tensors"] for row in result["rows"]] == [1, 4]
        for row in result["rows"]:
            check_times(row)
            messages = result["workers"] * row["tensors"]
            assert row["messages_per_s"] == pytest.approx(messages / row["median_ms"] * 1e3)
            assert row["server_message_us"] >= 0 < row["worker_message_us"]


def test_the_command_as_a_rank_of_a_job(tmp_path):
    argv = [
        "paceline",
        "run",
        "-np",
        "2",
        "paceline",
        "bench",
        "allreduce",
        "--sizes",
        "4KiB",
        "--duration",
        "100ms",
        "--idle",
        "0",
    ]
    _, report = run(argv, tmp_path / "job.json")
    assert report["results"][0]["ranks"] == 2


@pytest.mark.skipif(hosts.available() is not None, reason=str(hosts.available()))
def test_slow_links(tmp_path):
    argv = [
        sys.executable,
        BENCH / "links.py",
        "--systems",
        "embedded2,dedicated2,gloo2",
        "--sizes",
        "1MiB",
        "--duration",
        "1",
    ]
    printed, report = run(argv, tmp_path / "links.json")
    assert "one TCP stream" in printed
    assert [r["system"] for r in report["results"]] == ["embedded2", "dedicated2", "gloo2"]
    for result in report["results"]:
        check_times(result)
        # The links pass a burst at once.
        assert 0 < result["gbit_per_s"] < (1 << 20) / ((1 << 20) - (128 << 10))


@pytest.mark.skipif(hosts.available() is not None, reason=str(hosts.available()))
def test_slow_links_of_two_workers_each(tmp_path):
    argv = [sys.executable, BENCH / "links.py", "--per-host", "2", "--systems", "embedded4"]
    _, report = run([*argv, "--sizes", "1MiB", "--duration", "0.1"], tmp_path / "links.json")
    (result,) = report["results"]
    assert result["limit_gbit_per_s"] == report["stream"]["before_gbit_per_s"] / 2


def test_a_system_of_links_may_have_ten_workers_or_more(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import links

    assert links.parse_system("dedicated4") == ("dedicated", 4)
    assert links.parse_system("embedded16") == ("embedded", 16)


@pytest.mark.parametrize(
    ("system", "workers", "servers", "per_host", "sums", "share"),
    [
        ("paceline", 4, 0, 1, "1", 4 / 6),
        ("paceline", 4, 0, 2, "1", 1 / 2),  # a host sends half of its two gradients, and its half of the sum twice
        ("paceline", 6, 0, 2, "1", 6 / 16),
        ("gloo", 4, 0, 2, "1", 4 / 6),
        ("paceline", 4, 2, 1, "1", 1 / 2),
        ("paceline", 4, 2, 2, "1", 1),
        ("paceline", 4, 2, 2, "0", 1 / 2),
    ],
)
def test_the_limit_of_links_with_several_workers_on_a_host(
    monkeypatch, system, workers, servers, per_host, sums, share
):
    monkeypatch.syspath_prepend(str(BENCH))
    import links
    from fleet import Fleet

    where = types.SimpleNamespace(per_host=per_host)
    assert links.share_of_stream(Fleet(system, workers, where, servers, PACELINE_HOST_SUMS=sums)) == share


def test_losses_reads_what_comes_after_the_launchers_end(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import losses

    job = losses.Job(workers=1, servers=0, epochs=1)
    job.command = ["sh", "-c", "(sleep 0.5; echo 'test accuracy: 97.50%'; echo identical on all workers) & exit 0"]
    with job:
        assert job.result(HANG_S) == 97.5


def test_losses_bears_that_a_worker_ends_before_it_is_killed(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import losses

    job = losses.Job(workers=1, servers=0, epochs=1)
    job.command = ["sh", "-c", f'sleep {HANG_S} & echo "rank 0 of 1 (pid $!) trains"; wait']
    monkeypatch.setattr(job, "start_server", lambda: None)
    with job:
        job.servers.append(subprocess.Popen(["sleep", str(HANG_S)]))
        begun = time.monotonic()
        while not (workers := job.training()):
            assert time.monotonic() - begun < HANG_S, "no worker"
            time.sleep(0.01)
        os.kill(*job.places, signal.SIGKILL)
        job.launcher.wait(HANG_S)
        job.kill(random.Random(1), workers)
        assert job.training() == []
