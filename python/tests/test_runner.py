"""Functions in the processes of a job: horovod.run and paceline.runner.run."""

import os

import pytest

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
