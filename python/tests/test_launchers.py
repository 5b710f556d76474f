"""Workers that another launcher started find their job through the environment."""

import os
import secrets
import socket
import subprocess
import sys

import pytest
from jobs import HANG_S

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
print("done on", hvd.__name__)
"""


def clean_environment():
    strange = ("PACELINE_", "HOROVOD_", "OMPI_", "SLURM_", "PMI", "RANK", "LOCAL_", "WORLD_", "MASTER_", "TORCHELASTIC")
    return {k: v for k, v in os.environ.items() if not k.startswith(strange)} | {"OMP_NUM_THREADS": "1"}


def script(tmp_path, with_torch, horovod=False):
    path = tmp_path / "train.py"
    code = SCRIPT.format(with_torch=with_torch)
    path.write_text(code.replace("paceline.torch as", "horovod.torch as") if horovod else code)
    return path


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_torchrun_needs_nothing_else(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
        + [str(script(tmp_path, True))],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("done on") == 2


def test_scripts_of_torch_distributed_run_under_our_launcher(tmp_path):
    run = subprocess.run(
        ["paceline", "run", "-np", "2", sys.executable, str(script(tmp_path, True))],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("done on") == 2


def as_horovod(env):
    """The environment after `eval "$(paceline env --horovod)"`."""
    shell = 'said=$(paceline env --horovod) && eval "$said" && printf %s "$PYTHONPATH"'
    done = subprocess.run(["sh", "-c", shell], env=env, capture_output=True, text=True, check=True)
    return env | {"PYTHONPATH": done.stdout}


def test_torchrun_starts_a_script_that_imports_horovod(tmp_path):
    port = str(free_port())
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
        + [str(script(tmp_path, False, horovod=True))],
        env=as_horovod(clean_environment()),
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
def test_other_launchers_name_the_scheduler(launcher, tmp_path):
    secret = secrets.token_hex(16)
    address = f"127.0.0.1:{free_port()}"
    env = as_horovod(clean_environment()) | {"PACELINE_JOB_SECRET": secret, "PACELINE_SCHEDULER": address}
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
