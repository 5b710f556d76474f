"""Functions in the processes of a job: horovod.run and paceline.runner.run."""

import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from jobs import HANG_S

from paceline.runner import run


def reduce(first, *, factor):
    import torch

    import paceline.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([first + hvd.rank()]), op=hvd.Sum)
    return hvd.rank(), hvd.size(), factor * total.item()


def test_results_come_in_the_order_of_ranks():
    offset = 10  # of this frame: the function is pickled with it
    results = run(lambda first, factor: (*reduce(first, factor=factor), offset), (1,), {"factor": 2}, num_proc=2)
    assert results == [(0, 2, 6, 10), (1, 2, 6, 10)]


def fail_on_rank_1():
    if os.environ["PACELINE_RANK"] == "1":
        raise KeyError("the reason")
    return "fine"


def test_the_error_has_the_traceback_of_the_rank_that_failed(tmp_path):
    with pytest.raises(RuntimeError, match="rank 1 failed") as caught:
        run(fail_on_rank_1, num_proc=2, output_filename=str(tmp_path / "out"), hosts="localhost:2", start_timeout=600)
    assert "KeyError: 'the reason'" in str(caught.value) and "in fail_on_rank_1" in str(caught.value)
    assert "the reason" in (tmp_path / "out" / "rank.1" / "stderr").read_text()


def test_a_job_that_cannot_start():
    with pytest.raises(RuntimeError, match="exit code"):
        run(fail_on_rank_1, num_proc=2, executable="/nowhere/python")


def versions():
    import threadpoolctl

    return sys.prefix, threadpoolctl.__version__


def test_another_interpreter_has_its_own_packages(tmp_path):
    """An environment with a package of its own, which finds the others in this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "threadpoolctl.py").write_text("__version__ = 'its own'")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    python = str(tmp_path / "venv" / "bin" / "python")
    assert run(versions, num_proc=2, executable=python) == [(str(tmp_path / "venv"), "its own")] * 2


PROGRAM = """
import os, pathlib, sys, time
from paceline.runner import run

directory = pathlib.Path(sys.argv[1])

def rank():
    try:
        (directory / f"pid.{os.environ['PACELINE_RANK']}").write_text(str(os.getpid()))
        time.sleep(1000)
    finally:
        time.sleep(0.5)
        (directory / f"saved.{os.environ['PACELINE_RANK']}").touch()

run(rank, num_proc=2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_job_ends_with_the_program_that_runs_it(number, tmp_path):
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + HANG_S

    def wait(until):
        while not until():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    ranks = [tmp_path / f"pid.{rank}" for rank in range(2)]
    wait(lambda: all(rank.exists() and rank.read_text() for rank in ranks))
    program.send_signal(number)
    wait(lambda: not any(Path(f"/proc/{rank.read_text()}").exists() for rank in ranks))
    said = program.communicate(timeout=HANG_S)[1]
    assert program.returncode == -number, said
    if number == signal.SIGINT:  # at SIGTERM Python ends without more
        assert all((tmp_path / f"saved.{rank}").exists() for rank in range(2)), said


def test_arguments():
    with pytest.warns(DeprecationWarning, match="np is deprecated, use num_proc instead"):
        assert run(lambda: os.environ["PACELINE_SIZE"], np=1) == ["1"]
    with pytest.raises(ValueError, match="hosts or hostfile"):
        run(reduce, hosts="localhost:2", hostfile="hosts")
    with pytest.raises(ValueError, match="use_gloo or use_mpi"):
        run(reduce, use_gloo=True, use_mpi=True)
    for wrong in (0, -1, "two", 1.5):
        with pytest.raises(ValueError, match=f"num_proc={wrong!r}: allowed are whole numbers from 1"):
            run(reduce, num_proc=wrong)
    with pytest.raises(NotImplementedError, match="paceline run -H"):
        run(reduce, hosts="localhost:1,elsewhere:1")
    with pytest.raises(NotImplementedError, match="paceline run -H"):
        run(reduce, hostfile="hosts")
    with pytest.raises(NotImplementedError, match="reset_limit=1 is for elastic training"):
        run(reduce, reset_limit=1)
    with (
        pytest.warns(DeprecationWarning, match="min_np is deprecated, use min_num_proc instead"),
        pytest.raises(NotImplementedError, match="elastic"),
    ):
        run(reduce, min_np=1)
