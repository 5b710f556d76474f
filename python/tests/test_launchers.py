"""Workers that another launcher started find their job through the environment."""

import contextlib
import secrets
import subprocess
import sys

import hosts
import pytest
from jobs import HANG_S, clean_environment

# Torch's own process group beside ours: MASTER_PORT belongs to its store.
SCRIPT = """
import torch, torch.distributed as dist
import paceline.torch as hvd
hvd.init()
if {with_torch}:
    dist.init_process_group("gloo")
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, name="x")
assert total.item() == 3, total
assert (hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()) == (2, hvd.rank(), 2, 1)
if {with_torch}:
    same = torch.tensor([float(hvd.rank())])
    dist.all_reduce(same)
    assert same.item() == 1 and dist.get_rank() == hvd.rank()
    dist.destroy_process_group()
hvd.shutdown()
print("done on " + hvd.__name__ + chr(10), end="", flush=True)  # in one piece, beside the other rank's
"""


def environment():
    """That of the tests' jobs."""
    return clean_environment() | {"OMP_NUM_THREADS": "1"}


def script(tmp_path, with_torch, horovod=False):
    path = tmp_path / "train.py"
    code = SCRIPT.format(with_torch=with_torch)
    path.write_text(code.replace("paceline.torch as", "horovod.torch as") if horovod else code)
    return path


def test_torchrun_needs_nothing_else(tmp_path, port):
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
        + [str(script(tmp_path, True))],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("done on") == 2


def as_horovod(env):
    """The environment after `eval "$(paceline env --horovod)"`."""
    shell = 'said=$(paceline env --horovod) && eval "$said" && printf %s "$PYTHONPATH"'
    done = subprocess.run(["sh", "-c", shell], env=env, capture_output=True, text=True, check=True)
    return env | {"PYTHONPATH": done.stdout}


def test_torchrun_starts_a_script_that_imports_horovod(tmp_path, port):
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
        + [str(script(tmp_path, False, horovod=True))],
        env=as_horovod(environment()),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("done on paceline.torch") == 2


LAUNCHERS = {
    "mpirun": lambda rank: {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "srun": lambda rank: {
        "SLURM_PROCID": rank,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": "0",
    },
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_other_launchers_name_the_scheduler(launcher, tmp_path, port):
    secret = secrets.token_hex(16)
    address = f"127.0.0.1:{port}"
    env = as_horovod(environment()) | {"PACELINE_JOB_SECRET": secret, "PACELINE_SCHEDULER": address}
    scheduler = subprocess.Popen(["paceline", "scheduler", "--listen", address], env=env)
    try:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script(tmp_path, False, horovod=True))],
                env=env | LAUNCHERS[launcher](str(rank)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        for rank in ranks:
            output, _ = rank.communicate(timeout=HANG_S)
            assert rank.returncode == 0 and "done on" in output, output
    finally:
        scheduler.terminate()
        scheduler.wait(HANG_S)


# Rank 0 looks at its own job from outside, as a user in another terminal does.
FOUND = """
import json, os, subprocess
import torch, paceline.torch as hvd
def status():
    env = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    return subprocess.run(["paceline", "status", "--json"], env=env, capture_output=True, text=True)
hvd.init()
for _ in range(3):
    hvd.allreduce(torch.ones(1000), name="gradient")
if hvd.rank() == 0:
    (job,) = json.loads(status().stdout)
    assert job["state"] == "running", job
    assert [(r["rank"], r["iteration"]) for r in job["ranks"]] == [(0, 3), (1, 3)], job
hvd.barrier()
hvd.shutdown()
if os.environ["RANK"] == "0":
    after = status()
    assert after.returncode == 1 and "no job of this user" in after.stderr, after
print("done")
"""


def test_a_job_within_a_process_of_an_elastic_one_has_its_own_places(tmp_path):
    environ = environment() | {"PACELINE_ELASTIC_PROCESS": "3", "PACELINE_ELASTIC_ROUND": "7"}
    command = ["paceline", "run", "-np", "2", sys.executable, script(tmp_path, False)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0 and done.stdout.count("done on paceline.torch") == 2, done.stdout + done.stderr


def test_a_job_of_another_launcher_is_found_until_it_ends(tmp_path, port):
    path = tmp_path / "found.py"
    path.write_text(FOUND)
    private = {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-port",
            str(port),
            str(path),
        ],
        env=environment() | private,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert run.returncode == 0 and run.stdout.count("done") == 2, run.stdout + run.stderr


QUIET = """
import torch, paceline.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(1000), name="gradient")
hvd.shutdown()
hvd.init()
"""


@pytest.mark.parametrize("servers", [[], ["--servers", "localhost,localhost"]], ids=["embedded", "dedicated"])
@pytest.mark.parametrize("variable", [None, "PACELINE_SYNK"])
def test_a_healthy_job_prints_nothing_but_what_is_wrong_with_its_environment_and_that_once(variable, servers, tmp_path):
    path = tmp_path / "quiet.py"
    path.write_text(QUIET)
    run = subprocess.run(
        ["paceline", "run", "-np", "2", *servers, sys.executable, str(path)],
        env=environment() | ({variable: "bsp"} if variable else {}),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert run.returncode == 0 and run.stdout == "", run.stdout + run.stderr
    if variable is None:
        assert run.stderr == ""
    else:
        (line,) = run.stderr.splitlines()
        assert "PACELINE_SYNK is set, but there is no such setting: did you mean PACELINE_SYNC?" in line


@pytest.mark.skipif(hosts.available() is not None, reason=str(hosts.available()))
@pytest.mark.parametrize("master", ["one", "localhost", None])
def test_hosts_whose_own_names_lead_to_loopback(master, tmp_path):
    """As Debian's, where 127.0.1.1 has the host's name.

    master: MASTER_ADDR on rank 0's host; None where scheduler and server run by themselves, on `two`.
    """
    env = clean_environment() | {"PACELINE_JOB_SECRET": secrets.token_hex(16), "PACELINE_START_TIMEOUT": "30"}
    elsewhere = {"PACELINE_SCHEDULER": "two:29600", "PACELINE_SERVERS": "dedicated", "PACELINE_NUM_SERVERS": "1"}
    with hosts.Hosts(["one", "two"], tmp_path, own="127.0.1.1") as network, contextlib.ExitStack() as stack:

        def start(host, command, **settings):
            command = network.command(host, f"exec paceline {command}")
            process = stack.enter_context(subprocess.Popen(command, env=env | settings))
            stack.callback(process.kill)
            return process

        if master is None:
            start("two", "scheduler --listen two:29600")
            start("two", "server --scheduler two:29600 --listen two:29601")
        ranks = []
        for rank in range(4):
            host = ("one", "two")[rank // 2]
            place = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
            found = (
                elsewhere
                if master is None
                else {"MASTER_ADDR": master if host == "one" else "one", "MASTER_PORT": "29500"}
            )
            ranks.append(start(host, "bench allreduce --sizes 4KiB --duration 1ms --idle 0s", **place, **found))
        assert [process.wait(HANG_S) for process in ranks] == [0, 0, 0, 0]
