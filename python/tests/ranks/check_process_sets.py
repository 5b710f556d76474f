"""Process sets: registered while the job runs, used by every collective, removed again."""

import contextlib

import pytest
import torch

import paceline.torch as hvd


@contextlib.contextmanager
def process_set(*ranks):
    registered = hvd.add_process_set(ranks)
    yield registered
    hvd.barrier()
    assert hvd.remove_process_set(registered)
    assert registered.process_set_id is None and registered.size() is None and registered.rank() is None


def test_the_global_set_knows_the_job(rank, size):
    everyone = hvd.global_process_set
    assert (everyone.process_set_id, everyone.ranks, everyone.size()) == (0, list(range(size)), size)
    assert everyone.rank() == rank and everyone.included()
    assert hvd.remove_process_set(everyone) is False


def test_a_set_knows_its_ranks(rank, size):
    members = list(range(1, size))  # all but rank 0
    with process_set(*reversed(members)) as some:
        assert some.process_set_id > 0 and some.ranks == members and some.size() == size - 1
        assert some.included() == (rank > 0)
        if rank:
            assert some.rank() == rank - 1
        assert str(some).startswith(f"ProcessSet(process_set_id={some.process_set_id}, ranks={members}")


def test_collectives_run_among_the_members(rank, size):
    with process_set(*{1, size - 1}) as few, process_set(0) as alone:
        if rank == 0:
            assert torch.equal(hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=alone), torch.ones(2))
        if few.included():
            n = few.size()
            assert torch.equal(
                hvd.allreduce(torch.full((3,), float(rank)), op=hvd.Sum, process_set=few),
                torch.full((3,), float(sum(few.ranks))),
            )
            assert hvd.allgather(torch.tensor([rank]), process_set=few).tolist() == few.ranks
            assert hvd.broadcast(torch.tensor(rank), size - 1, process_set=few).item() == size - 1
            assert hvd.alltoall(torch.full((n,), rank), process_set=few).tolist() == few.ranks
            assert hvd.reducescatter(torch.ones(n), op=hvd.Sum, process_set=few).tolist() == [float(n)]
            assert hvd.broadcast_object({"from": rank}, root_rank=1, process_set=few) == {"from": 1}
            assert hvd.allgather_object(rank, process_set=few) == few.ranks
            hvd.barrier(process_set=few)


def test_sets_use_the_same_names_without_disturbing_each_other(rank, size):
    with process_set(*range(size // 2)) as low, process_set(*range(size // 2, size)) as high:
        mine = low if low.included() else high
        handles = [
            hvd.allreduce_async(torch.ones(5), op=hvd.Sum, name=f"shared.{i}", process_set=mine) for i in range(10)
        ]
        everyone = hvd.allreduce(torch.ones(5), op=hvd.Sum, name="shared.0.all")
        assert torch.equal(everyone, torch.full((5,), float(size)))
        assert all(torch.equal(hvd.synchronize(h), torch.full((5,), float(mine.size()))) for h in handles)


def test_a_removed_set_can_be_added_again(size):
    for _ in range(5):
        with process_set(1) as again:
            assert again.size() == 1


def test_wrong_sets_are_refused(rank, size):
    with process_set(1), pytest.raises(ValueError, match="exists already"):
        hvd.add_process_set([1])
    with pytest.raises(ValueError, match="exists already"):
        hvd.add_process_set(range(size))
    with pytest.raises(ValueError, match=rf"{size + 7}"):
        hvd.add_process_set([0, size + 7])
    with pytest.raises(ValueError, match="list of ranks"):
        hvd.ProcessSet(["a"])
    with pytest.raises(ValueError, match="list of ranks"):
        hvd.ProcessSet(object())
    with pytest.raises(ValueError, match="is not registered"):
        hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0]))
    assert hvd.remove_process_set(hvd.ProcessSet([0])) is False


def test_who_is_not_in_the_set_cannot_use_it(rank, size):
    with process_set(0) as alone:
        if rank > 0:
            with pytest.raises(ValueError, match=rf"rank {rank} is not in process set"):
                hvd.allreduce(torch.ones(1), process_set=alone)
        with pytest.raises(ValueError, match="root" if rank == 0 else "is not in process set"):
            hvd.broadcast(torch.ones(1), size - 1, process_set=alone)
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=hvd.ProcessSet([0]))
