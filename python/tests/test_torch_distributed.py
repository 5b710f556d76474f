"""The torch.distributed backend, under torchrun and `paceline run`: scripts that import nothing of Paceline."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jobs import HANG_S, clean_environment

# It is an ImportError there (decision 133).
pytestmark = pytest.mark.skipif(torch.__version__ < "2.7", reason="PyTorch before 2.7 has no backend of Paceline")

SCRIPTS = Path(__file__).parent / "torch_distributed"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
STANDALONE = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]  # finds a port itself


def run(argv, **env):
    done = subprocess.run(
        [*map(str, argv)],
        env=clean_environment() | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return sorted(done.stdout.splitlines())


def ended(size, port, script, *arguments, **settings):
    """(exit status, output, errors) of each rank, started as by torchrun, which imports PyTorch itself too."""
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    env = clean_environment() | sizes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | settings
    argv = [sys.executable, "-u", SCRIPTS / script, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(argv, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)}, **pipes) for r in range(size)]
    outputs = []
    for rank in ranks:
        try:
            outputs.append(rank.communicate(timeout=HANG_S))
        except subprocess.TimeoutExpired:
            for each in ranks:
                each.kill()
            outputs.append(rank.communicate())
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


def run_ranks(size, port, script, *arguments, **settings):
    """What they say, sorted."""
    ranks = ended(size, port, script, *arguments, **settings)
    assert [status for status, *_ in ranks] == [0] * size, [
        (status, said[-2000:], errors[-4000:]) for status, said, errors in ranks
    ]
    return sorted(line for _, said, _ in ranks for line in said.splitlines())


def test_every_operation_under_torchrun(port):
    said = run([*TORCHRUN, port, SCRIPTS / "operations.py", "paceline", "cpu"])
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_every_operation_with_another_default_device(port):
    said = run_ranks(2, port, "operations.py", "paceline", "cpu", "meta")
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_a_script_that_asks_for_gloo_gets_paceline(port):
    said = run([*TORCHRUN, port, SCRIPTS / "operations.py", "gloo", "cpu"], PACELINE_TAKEOVER="gloo")
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_paceline_run_takes_over():
    said = run(
        ["paceline", "run", "-np", "2", "--takeover", "gloo", sys.executable, SCRIPTS / "operations.py", "gloo", "cpu"]
    )
    assert [line.rpartition("rank")[2] for line in said] == [" 0 is done", " 1 is done"]


def test_a_script_may_number_its_ranks_otherwise_than_paceline_run():
    said = run(["paceline", "run", "-np", "3", sys.executable, SCRIPTS / "permuted.py"])
    assert sorted(line[-len("rank 0 is done") :] for line in said) == [f"rank {rank} is done" for rank in range(3)]


def test_the_example_learns_the_digits_on_two_workers():
    example = Path(__file__).parents[2] / "examples" / "ddp.py"
    said = "\n".join(run(["paceline", "run", "-np", "2", "--takeover", "gloo", sys.executable, example]))
    assert float(re.search(r"test accuracy: (\d+\.\d+)%", said)[1]) > 95, said
    assert re.search(r"throughput: +[\d,]+ images/s over 2 workers", said), said
    assert "identical on all workers" in said and "exchanged by:  paceline" in said, said


def test_memory_outlives_works_that_end_early(port):
    """Their errors name the ranks that did not come."""
    said = run_ranks(2, port, "leftovers.py")
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_what_callbacks_of_futures_begin_matches_on_all_ranks(port):
    said = run_ranks(2, port, "chains.py")
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_a_work_that_has_ended_has_its_futures_value(port):
    said = run_ranks(2, port, "ends.py")
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_ctrl_c_and_handlers_of_signals_lose_no_memory_and_no_end(port):
    said = run_ranks(2, port, "signals.py")
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_callbacks_that_run_at_the_end_of_the_process_end_first(port):
    said = run_ranks(2, port, "exits.py", "well")
    assert said == ["rank 0 has 2.0", "rank 1 has 2.0"]


def test_threads_and_handlers_of_atexit_chain_callbacks_when_main_has_ended(port):
    said = run_ranks(2, port, "exits.py", "thread")
    trained = ["rank 0 has trained", "rank 1 has trained"]
    last = ["rank 0 at last 2.0", "rank 1 at last 2.0", "rank 0 has ended", "rank 1 has ended"]
    assert said == sorted(trained + (last if sys.version_info < (3, 12) else []))


@pytest.mark.parametrize("how", ["exception", "exit"])
def test_a_callback_does_not_keep_a_process_that_an_error_ends(how, port):
    done = subprocess.run(
        [*TORCHRUN, str(port), SCRIPTS / "exits.py", how],
        env=clean_environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode != 0 and "the program's error" in done.stderr
    assert done.stdout.splitlines() == ["rank 0 has an error"], done.stdout + done.stderr[-4000:]


def test_names_of_coalesced_operations_live_until_they_are_submitted(port):
    said = run_ranks(2, port, "names.py", PYTHONMALLOC="debug")  # overwrites what is freed
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_a_broadcast_in_a_callback_is_one_in_elastic_jobs(port):
    said = run_ranks(2, port, "spreads.py", PACELINE_ELASTIC="1")
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_a_barrier_that_a_rank_has_missed_leaves_later_ones_alone(port):
    said = run_ranks(2, port, "barriers.py")
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_outputs_may_lie_anywhere_in_their_own_inputs(port):
    said = run_ranks(2, port, "overlaps.py")
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_default_groups_in_one_job_have_nothing_of_those_before(port):
    said = run_ranks(2, port, "shared.py")
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_groups_match_though_ranks_have_made_other_groups_before(port):
    """With Gloo the next group of all ranks times out: PyTorch's numbers of groups are no longer the same."""
    said = run_ranks(2, port, "numbered.py")
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_groups_of_some_ranks_where_the_default_group_is_bound_to_a_device(port):
    said = run_ranks(3, port, "bound.py")
    assert said == [f"rank {rank} is done" for rank in range(3)]


@pytest.mark.parametrize(
    "ours, devices", [("paceline", "paceline"), ("gloo", "gloo"), ("gloo", "cpu:gloo,cuda:another")]
)
def test_groups_beside_a_default_group_of_another_backend(port, ours, devices):
    if "," in devices and torch.__version__ < "2.14":
        pytest.skip("a group with Paceline has no other backend")  # what it is instead: the next test
    takeover = {"PACELINE_TAKEOVER": "gloo"} if ours == "gloo" else {}
    said = run_ranks(3, port, "beside.py", ours, devices, **takeover)
    assert said == [f"rank {rank} is done" for rank in range(3)]


# From 2.14 on they are groups with Paceline: the test before.
@pytest.mark.skipif(torch.__version__ >= "2.14", reason="groups have a backend for each kind of device")
def test_groups_with_two_backends_before_pytorch_2_14(port):
    """Ours alone is their backend. A takeover leaves them, and says so."""
    begin = (
        "import paceline.torch.distributed; from torch.distributed import *;"
        " distributed_c10d.Backend.register_backend('another', ProcessGroupGloo, devices=['cuda']);"
        f" init_process_group('cpu:%s,cuda:another', init_method='tcp://127.0.0.1:{port}', rank=0, world_size=1);"
        " print(type(distributed_c10d._get_default_group()).__name__)"
    )
    taken, named = (
        subprocess.run(
            [sys.executable, "-c", begin % backend],
            env=clean_environment() | {"PACELINE_TAKEOVER": "gloo"},
            capture_output=True,
            text=True,
        )
        for backend in ("gloo", "paceline")
    )
    assert taken.stdout == "ProcessGroup\n" and "leaves groups with 'cpu:gloo,cuda:another'" in taken.stderr
    assert named.returncode == 1 and "has no other one: make a group with each" in named.stderr


def test_groups_of_every_kind_give_what_gloo_gives(port):
    """Also under PyTorch's own checks of collectives, where the script names the ranks' meeting place."""

    def groups(backend, *where, **env):
        return run([*STANDALONE, "4", SCRIPTS / "groups.py", backend, *where], **env)

    gloo = groups("gloo")
    assert len(gloo) == 4 * (8 if torch.__version__ >= (2, 15) else 6)  # before, none is split for tensors on the CPU
    assert groups("paceline") == gloo
    assert groups("paceline", f"tcp://127.0.0.1:{port}", TORCH_DISTRIBUTED_DEBUG="DETAIL") == gloo


def test_compiled_models_have_the_bits_that_gloo_gives(port):
    def trained(*arguments):
        digests = run_ranks(2, port, "compiled.py", *arguments)
        assert len(digests) == 2 and len(set(digests)) == 1, digests
        return digests[0]

    gloo = trained("gloo", "around", "destroy")
    assert trained("paceline", "around", "destroy") == gloo
    assert trained("paceline", "within", "leave") == gloo
    assert trained("hvd", "optimizer", "leave") == gloo


def test_compiled_code_calls_collectives_as_they_are(port):
    """torch.compile compiled the backend's own code, too, and failed at `reduce`."""
    gloo, paceline = (run_ranks(2, port, "compiled_calls.py", b) for b in ("gloo", "paceline"))
    assert paceline == gloo and len(gloo) == 10


def survivors(port, script, *arguments, killed=2, **settings):
    """(what it says, its errors) of the ranks of three, in order, without the one that a script kills."""
    ranks = ended(3, port, script, *arguments, **settings)
    assert [status for status, *_ in ranks] == [-signal.SIGKILL if r == killed else 0 for r in range(3)], ranks
    return [(said, errors) for r, (_, said, errors) in enumerate(ranks) if r != killed]


@pytest.mark.parametrize("first", ["torch", "hvd"])
def test_what_waits_for_a_rank_that_is_killed_names_it(port, first):
    for said, errors in survivors(port, "killed.py", first):
        calls = ["monitored_barrier", "all_reduce", "recv", "send", "barrier"]
        assert [line.partition(":")[0] for line in said.splitlines()] == calls, errors
        assert all("worker 2" in line for line in said.splitlines()), said


@pytest.mark.parametrize("way", ["plain", "codec", "own"])
def test_distributed_data_parallel_says_which_rank_was_killed(port, way):
    for said, errors in survivors(port, "killed_training.py", way):
        assert said.startswith("step 3: ") and "peer lost: worker 2" in said and said.count("\n") == 1, said + errors


def test_built_in_hooks_and_uneven_inputs_give_gradients_of_gloo(port):
    gloo, paceline = (run_ranks(2, port, "hooks.py", backend) for backend in ("gloo", "paceline"))
    assert gloo == paceline == ["rank 0 [1.5, 1.5, 1.5, 1.5]", "rank 1 [1.5, 1.5, 1.5, 1.0, 1.0, 1.5, 2.0, 2.0]"]


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("way", ["plain", "codec"])
def test_elastic_jobs_of_distributed_data_parallel_go_on_with_means_of_those_that_are_left(port, killed, way):
    settings = {"PACELINE_ELASTIC": "1"} | ({"PACELINE_COMPRESSION": "fp16"} if way == "codec" else {})
    for said, errors in survivors(port, "lost.py", str(killed), way, killed=killed, **settings):
        assert "went on" in said, errors


def test_training_gives_the_bits_of_gloo(port, tmp_path):
    """DDP, ZeRO, FSDP2, tensor parallel and checkpoints. A sum of two numbers has one result, whatever their order."""
    results = [
        run_ranks(2, port, "training.py", backend, tmp_path / backend, "cpu", PACELINE_SUM_IN_RANK_ORDER="1")
        for backend in ("gloo", "paceline")
    ]
    assert len(results[0]) == 10
    ddp = next(line for line in results[0] if line.startswith("rank 0 ddp")).split(maxsplit=3)[3]
    if torch.__version__ < "2.12":  # 2.7's Gloo gives FSDP2 sums where it asks for means: then its bits are DDP's
        results[0] = [re.sub(r"^(rank . (?:fsdp2|checkpoints)) .*", rf"\1 {ddp}", line) for line in results[0]]
    for gloo, paceline in zip(*results, strict=True):
        assert gloo == paceline


def test_operations_on_a_device(port, device):
    """Through pinned host memory. With a GPU, the ranks share the first one."""
    kind, env = device
    said = run_ranks(2, port, "operations.py", "paceline", kind, **env)
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_operations_on_a_device_keep_the_order_of_streams(port, device):
    kind, env = device
    said = run_ranks(2, port, "streams.py", kind, **env)
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_what_a_device_has_still_to_do_holds_up_what_needs_it_alone(port, device):
    kind, env = device
    said = run_ranks(2, port, "held.py", kind, **env)
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_callbacks_keep_memory_on_a_device_and_have_the_programs_device(port, device):
    kind, env = device
    said = run_ranks(2, port, "callback_memory.py", kind, **env, OFFHOST_DEVICES="2")
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_buffers_on_the_cpu_and_on_a_device_in_an_elastic_job(port, device):
    kind, env = device
    said = run_ranks(2, port, "spreads.py", kind, **env, PACELINE_ELASTIC="1")
    assert said == ["rank 0 is done", "rank 1 is done"]


@pytest.mark.skipif(torch.__version__ < "2.14", reason="a group with Paceline has no other backend (decision 133)")
def test_a_group_that_has_another_backend_for_the_cpu(port, device):
    kind, env = device
    said = run_ranks(2, port, "mixed.py", kind, **env, PACELINE_COMPRESSION="int8")
    assert said == ["rank 0 is done", "rank 1 is done"]


def test_training_on_a_device_gives_the_bits_of_the_cpu(port, tmp_path, device):
    """The tests' own device computes as the CPU does; of a GPU's bits the test asks that the ranks have the same."""
    (kind, env), results = device, []
    if kind == "offhost" and torch.__version__ < "2.12":
        pytest.skip("FSDP2 has operations of its own for devices that it knows, in PyTorch 2.7 at least")
    for where in ("cpu", kind) if kind == "offhost" else (kind,):
        (tmp_path / where).mkdir()
        said = run_ranks(2, port, "training.py", "paceline", tmp_path / where, where, **env)
        ranks = [{way: bits for _, way, bits in (s[5:].split(" ", 2) for s in said if s[5] == r)} for r in "01"]
        assert len(ranks[0]) == 5 and ranks[0] == ranks[1]
        assert ranks[0]["ddp"] == ranks[0]["fsdp2"] == ranks[0]["checkpoints"] != ranks[0]["zero"]
        results.append(ranks[0])
    assert results[0] == results[-1]


def test_buckets_are_summed_in_place_and_give_the_bits_of_gloo(port):
    gloo, paceline = (run_ranks(2, port, "buckets.py", backend) for backend in ("gloo", "paceline"))
    assert len(gloo) == 2 * 10 and paceline == gloo


INT8 = {"PACELINE_COMPRESSION": "int8"}


@pytest.mark.parametrize(("way", "env"), [("hook", {}), ("setting", INT8), ("own", INT8)])
def test_codecs_for_distributed_data_parallel(port, way, env):
    said = run_ranks(2, port, "codec.py", way, **env)
    assert said == ["alike True learns True"] * 2


def test_training_with_a_codec_goes_on_from_a_checkpoint_as_if_it_had_not_ended(port, tmp_path):
    def trained(way):
        (digest,) = set(run_ranks(2, port, "checkpoint.py", tmp_path, way))
        return digest

    whole = trained("whole")
    assert trained("resumed") == whole != trained("without")


# In `make test`: one of each kind. All in `make test-torch-distributed`.
SOME = "test_all_reduce_sum or test_all_gather or test_all_to_all or test_broadcast or test_isend or test_gather"


def test_pytorchs_own_tests(tmp_path):
    """Those that pass with Gloo pass; docs/torch-distributed.md has the exceptions."""
    report = tmp_path / "report.xml"
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout=900",  # a hang is the failure of a test that has a name; suite.py has its own bound before
        SCRIPTS / "suite.py",
        f"--junitxml={report}",
    ]
    asked = os.environ.get("TORCH_DISTRIBUTED_TESTS", SOME)
    env = {"BACKEND": "gloo", "PACELINE_TAKEOVER": "gloo", "WORLD_SIZE": "4", "TEMP_DIR": str(tmp_path)}
    done = subprocess.run(
        [*map(str, argv), *(["-k", asked] if asked else [])],
        env=clean_environment() | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
    )
    cases = list(ET.parse(report).iter("testcase"))
    failed = {case.get("name") for case in cases if list(case.iter("failure")) or list(case.iter("error"))}
    passed = [case for case in cases if not len(case)]
    assert failed <= EXCEPTIONS and len(passed) >= 10, done.stdout[-8000:]


EXCEPTIONS = {
    "test_ddp_logging_data_cpu",  # PyTorch's own name for a backend that it does not know is "custom"
}


def test_a_backend_that_cannot_be_taken_over_is_an_error():
    done = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env=clean_environment() | {"PACELINE_TAKEOVER": "nccl"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "allowed are gloo" in done.stderr


def test_an_old_pytorch_is_an_import_error_that_says_what_works_with_it():
    said = errors_of("""
        import torch
        torch.__version__ = torch.torch_version.TorchVersion("2.6.1")
        import paceline.torch.distributed
    """)
    assert "needs PyTorch 2.7 or newer, and this is 2.6.1: use Horovod's API" in said, said


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize(
    "name",
    [
        "torch._C._distributed_c10d.Backend",
        "torch._C._distributed_c10d.Reducer",
        "torch._C._distributed_c10d.Reducer._rebuild_buckets",
        "torch._C._collect_all",
        "torch.nn.parallel.DistributedDataParallel._register_builtin_comm_hook",
    ],
)
def test_a_pytorch_without_a_name_that_is_used_is_an_import_error_that_names_it(name, backend):
    said = errors_of(
        f"""
        import pkgutil
        import torch.distributed as dist
        owner, _, name = "{name}".rpartition(".")
        delattr(pkgutil.resolve_name(owner), name)
        import paceline_takeover
        paceline_takeover.load()
        import paceline.torch.distributed
        dist.init_process_group("{backend}", store=dist.HashStore(), rank=0, world_size=1)
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        PACELINE_TAKEOVER="gloo" if backend == "gloo" else "",
    )
    assert f"ImportError: the torch.distributed backend of Paceline does not know PyTorch {torch.__version__}" in said
    assert "it is tested with 2.7 to 2.15" in said


def errors_of(code, **env):
    """What a program says that fails."""
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(argv, env=clean_environment() | env, capture_output=True, text=True)
    assert done.returncode != 0, done.stdout
    return done.stderr


def said_by(code, **env):
    """What a program prints."""
    env = clean_environment() | env
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_torch_loads_nothing_of_paceline():
    code = "import sys, torch; print(sorted(m for m in sys.modules if m.startswith('paceline')))"
    assert said_by(code) == "['paceline_takeover']"


@pytest.mark.parametrize("names", ["", "gloo"])
def test_taking_over_needs_no_import(names):
    code = "import torch, torch.distributed as dist; "
    code += "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1); "
    code += "print(type(dist.group.WORLD._get_backend(torch.device('cpu'))).__name__)"
    assert said_by(code, PACELINE_TAKEOVER=names) == ("PacelineBackend" if names else "ProcessGroupGloo")


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1", ""])
def test_other_hosts_are_not_told_a_loopback_address(monkeypatch, master):
    """Kubeflow's operator gives rank 0 MASTER_ADDR=localhost, and the others its service's name."""
    from paceline.torch.distributed import job

    monkeypatch.setenv("MASTER_ADDR", master)
    assert job._own_name() == socket.gethostname()
    monkeypatch.setenv("MASTER_ADDR", "train-master-0")
    assert job._own_name() == "train-master-0"


@pytest.mark.parametrize("placed", [{0, 1, 2}, {0}, set()])
def test_all_ranks_begin_at_the_launchers_scheduler_or_none(monkeypatch, placed):
    """When the last one has come: as with Gloo, the store's timeout is for ranks that are late."""
    from paceline.torch.distributed import job

    begun, store = [], dist.HashStore()
    store.set_timeout(timedelta(seconds=HANG_S))
    monkeypatch.setattr(job.engine, "init", lambda settings, environment=None: begun.append(dict(environment or {})))
    monkeypatch.setattr(job, "_launched", lambda rank, size: rank in placed)
    monkeypatch.setattr(job, "_ports", [])
    with ThreadPoolExecutor(3) as ranks:
        early = [ranks.submit(job._start, store, rank, 3) for rank in (0, 1)]
        done, _ = wait(early, timeout=0.5, return_when=FIRST_COMPLETED)
        assert not done and not begun
        wait([*early, ranks.submit(job._start, store, 2, 3)], timeout=HANG_S)
    places = [(env.get("PACELINE_SCHEDULER"), env.get("PACELINE_PORT")) for env in begun]
    assert len(places) == 3 and len(set(places)) == 1, begun
    assert (places[0] == (None, None)) == (len(placed) == 3), begun
