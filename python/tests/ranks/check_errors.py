"""Errors of operations, and their messages. After each of them the job continues."""

import pytest
import torch

import paceline.torch as hvd
from paceline.common import abi


@pytest.fixture(autouse=True)
def the_job_goes_on(rank, size):
    yield
    hvd.barrier()
    assert torch.equal(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(size)))


def failure(handle):
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.synchronize(handle)
    assert isinstance(caught.value, RuntimeError)
    return str(caught.value)


@pytest.mark.parametrize("case", ["length", "dimensions"])
def test_mismatched_shapes_are_named_on_every_rank(case, rank):
    shape = {"length": (3 + (rank == 0), 2), "dimensions": (6,) if rank == 0 else (2, 3)}[case]
    message = failure(hvd.allreduce_async(torch.ones(shape), name=f"bad shape {case}"))
    assert f"bad shape {case}" in message and "rank 0" in message
    for wanted in ("[4 2]", "[3 2]") if case == "length" else ("[6]", "[2 3]"):
        assert wanted in message or wanted.replace(" ", ", ") in message


def test_mismatched_types_are_named_on_every_rank(rank):
    dtype = torch.float32 if rank == 0 else torch.float64
    message = failure(hvd.allreduce_async(torch.ones(3, dtype=dtype), name="bad type"))
    assert "bad type" in message and "float32" in message and "float64" in message and "rank 0" in message


def test_mismatched_operators_are_named_on_every_rank(rank):
    op = hvd.Min if rank == 0 else hvd.Sum
    message = failure(hvd.allreduce_async(torch.ones(3), name="bad op", op=op))
    assert "bad op" in message and "Min" in message and "Sum" in message


@pytest.mark.parametrize("case", ["root", "shape", "type"])
def test_mismatched_broadcasts_are_named_on_every_rank(case, rank):
    root = 1 if case == "root" and rank else 0
    shape = 3 + (case == "shape" and rank > 0)
    dtype = torch.float64 if case == "type" and rank else torch.float32
    message = failure(hvd.broadcast_async(torch.ones(shape, dtype=dtype), root, name=f"bad broadcast {case}"))
    assert f"bad broadcast {case}" in message and "rank 0" in message


def test_mismatched_inner_dimensions_of_allgather(rank):
    message = failure(hvd.allgather_async(torch.ones(2, 3 + (rank == 0)), name="bad rows"))
    assert "bad rows" in message


def test_mismatched_prescale_factors(rank):
    message = failure(hvd.allreduce_async(torch.ones(3), name="bad scale", prescale_factor=1.0 + (rank == 0)))
    assert "bad scale" in message


def test_the_same_name_can_be_used_rightly_after_a_mismatch(rank, size):
    failure(hvd.allreduce_async(torch.ones(3 + (rank == 0)), name="again"))
    hvd.barrier()
    assert torch.equal(hvd.allreduce(torch.ones(3), name="again", op=hvd.Sum), torch.full((3,), float(size)))


def test_a_mismatch_leaves_other_operations_alone(rank, size):
    good = [hvd.allreduce_async(torch.ones(1000), name=f"good {i}", op=hvd.Sum) for i in range(5)]
    bad = hvd.allreduce_async(torch.ones(3 + (rank == 0)), name="bad among good")
    good += [hvd.allreduce_async(torch.ones(1000), name=f"good {i}", op=hvd.Sum) for i in range(5, 10)]
    assert "bad among good" in failure(bad)
    assert all(torch.equal(hvd.synchronize(h), torch.full((1000,), float(size))) for h in good)


def test_a_name_in_flight_cannot_be_used_again(rank):
    if rank == 0:
        first = hvd.allreduce_async(torch.ones(3), name="twice")
        with pytest.raises(ValueError, match="twice"):
            hvd.allreduce_async(torch.ones(3), name="twice")
    hvd.barrier()
    if rank > 0:
        first = hvd.allreduce_async(torch.ones(3), name="twice")
    assert torch.equal(hvd.synchronize(first), torch.ones(3))


def test_a_broadcast_whose_root_has_joined(rank, size):
    if rank == 0:
        hvd.join()
        return
    # Rank 0 may not have joined yet where the others already ask for its data: both ways end in the same error.
    assert "joined" in failure(hvd.broadcast_async(torch.ones(3), 0, name="from a joined root"))
    hvd.join()


def test_mpi_is_not_there():
    with pytest.raises(ValueError, match="MPI"):
        hvd.mpi_threads_supported()
    assert (hvd.mpi_built(), hvd.mpi_enabled(), hvd.nccl_built()) == (False, False, 0)
    assert not (hvd.ddl_built() or hvd.ccl_built() or hvd.cuda_built() or hvd.rocm_built())
    assert hvd.gloo_built() and hvd.gloo_enabled() and hvd.paceline_built()


def test_init_again_changes_nothing(rank, size):
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size) and hvd.is_initialized()
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, size, 0, 1)
    assert hvd.mpi_ops.is_homogeneous()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("a\0b", "has a NUL"), ("half \ud800", "is not Unicode"), ("n" * 4097, "a name of 4097 bytes")],
    ids=["NUL", "surrogate", "long"],
)
def test_names_that_the_engine_cannot_keep_are_refused(name, wanted):
    with pytest.raises(ValueError, match=wanted):
        hvd.allreduce_async(torch.ones(3), name=name)


def test_a_state_without_memory_is_refused():
    library = abi.library()
    for status in (library.pl_state(None, 8), library.pl_set_state(None, 8), library.pl_set_state(None, 1 << 63)):
        assert status == abi.ERR_INVALID
    assert library.pl_state(None, 0) >= 0
