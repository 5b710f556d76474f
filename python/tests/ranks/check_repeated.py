"""Allreduces that come again, which are submitted without waiting for the engine (pl_op.later)."""

import threading
import weakref

import pytest
import torch
from torch import nn

import paceline.torch as hvd
from paceline.common.engine import engine


@pytest.fixture
def left(monkeypatch):
    """The names of operations that were submitted so, in their order."""
    names, submit = [], engine.submit

    def spy(ops, handles):
        names.extend(op.name.decode() for op in ops if op.later and not op.at_once and len(ops) == 1)
        return submit(ops, handles)

    monkeypatch.setattr(engine, "submit", spy)
    return names


def summed(x, name, **how):
    return hvd.synchronize(hvd.allreduce_async_(x, name=name, op=hvd.Sum, **how))


def test_what_has_ended_well_is_left(left, rank, size):
    for time in range(5):
        x = torch.full((10,), float(rank + time))
        assert torch.equal(summed(x, "again"), torch.full((10,), sum(range(size)) + float(size * time)))
    assert left == ["again"] * 4


def test_each_result_is_its_own(left, size):
    sums = []
    for time in range(4):
        x = nn.Parameter(torch.full((3,), float(time)))
        sums.append(hvd.synchronize(hvd.allreduce_async(x, name="own", op=hvd.Sum)))
        seen = weakref.ref(x)
        del x
        assert seen() is None, "nobody uses it any more"
    assert left == ["own"] * 3
    assert [s.tolist() for s in sums] == [[float(size * time)] * 3 for time in range(4)]
    assert not any(s.requires_grad for s in sums)
    seen = weakref.ref(sums.pop())
    assert seen() is None


def test_memory_that_the_engine_cannot_use_repeats_too(left, size):
    for _ in range(3):
        x = torch.arange(6.0).view(2, 3).t()
        assert summed(x, "odd") is x
        assert x.tolist() == [[0.0, 3.0 * size], [1.0 * size, 4.0 * size], [2.0 * size, 5.0 * size]]
        summed(torch.ones(3, 2), "odd")
    assert left == ["odd"] * 5


def test_what_is_another_operation_is_submitted(left, size):
    for x, how in (
        (torch.ones(4), {}),
        (torch.ones(2, 2), {}),
        (torch.ones(2, 2, dtype=torch.float64), {}),
        (torch.ones(2, 2, dtype=torch.float64), {"prescale_factor": 2.0}),
        (torch.ones(2, 2, dtype=torch.float64), {"postscale_factor": 2.0}),
    ):
        assert summed(x, "another", **how)[0].sum() > 0
    summed(torch.ones(4), "before a join")
    assert left == []
    summed(torch.ones(4), "before a join")
    assert left == ["before a join"]
    hvd.join()
    summed(torch.ones(4), "before a join")
    assert left == ["before a join"]


@pytest.mark.parametrize("elements", [1, 1 << 14, 1 << 20, 5 << 20])
def test_of_any_size(left, elements, rank, size):
    """Several in flight, more than the engine holds together."""
    wanted = sum(range(size))
    for time in range(3):
        sums = [torch.full((elements,), float(rank + i)) for i in range(4)]
        handles = [hvd.allreduce_async_(x, name=f"{elements}/{i}", op=hvd.Sum) for i, x in enumerate(sums)]
        for i, handle in enumerate(handles):
            assert torch.equal(hvd.synchronize(handle), torch.full((elements,), float(wanted + size * i)))
        assert left == [f"{elements}/{i}" for i in range(4)] * time


def test_what_is_in_flight_is_refused_at_once(left, rank, size):
    summed(torch.ones(3), "in flight")
    if rank == 0:
        first = hvd.allreduce_async(torch.ones(3), name="in flight", op=hvd.Sum)
        with pytest.raises(ValueError, match="in flight"):
            hvd.allreduce_async(torch.ones(3), name="in flight", op=hvd.Sum)
    hvd.barrier()
    if rank > 0:
        first = hvd.allreduce_async(torch.ones(3), name="in flight", op=hvd.Sum)
    assert torch.equal(hvd.synchronize(first), torch.full((3,), float(size)))
    assert left == ["in flight"]


def test_what_has_failed_is_submitted(left, rank):
    for _ in range(2):
        summed(torch.ones(3), "fails")
    with pytest.raises(hvd.HorovodInternalError, match="fails"):
        summed(torch.ones(4 + rank), "fails")
    assert left == ["fails"]
    summed(torch.ones(3), "fails")
    assert left == ["fails"]


@pytest.mark.parametrize("polls", [False, True])
def test_many_by_several_threads(left, polls, rank, size):
    """More than there is room for, and every thread's sums are right."""
    count, wrong = 400, []

    def work(thread):
        for time in range(4):
            sums = [torch.full((3,), float(thread + time + i + rank)) for i in range(count)]
            handles = [hvd.allreduce_async_(x, name=f"many {thread}/{i}", op=hvd.Sum) for i, x in enumerate(sums)]
            for i, handle in enumerate(handles):
                while polls and not hvd.poll(handle):
                    pass
                want = float(size * (thread + time + i) + sum(range(size)))
                if not torch.equal(hvd.synchronize(handle), torch.full((3,), want)):
                    wrong.append((thread, time, i))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(left) >= 3 * 3 * count


def test_join_comes_after_what_was_left(size):
    for _ in range(2):
        handles = [hvd.allreduce_async(torch.ones(2), name=f"before a join {i}", op=hvd.Sum) for i in range(50)]
        last = hvd.join()
        assert 0 <= last < size
        for handle in handles:
            assert torch.equal(hvd.synchronize(handle), torch.full((2,), float(size)))
        for i in range(50):
            summed(torch.ones(2), f"before a join {i}")


def test_a_process_set_is_removed_after_what_was_left(left, rank):
    for _ in range(2):
        alone, handles = hvd.add_process_set([0]), []
        if rank == 0:
            for i in range(20):
                summed(torch.ones(2), f"in a set {i}", process_set=alone)
            names = [f"in a set {i}" for i in range(20)]
            left.clear()
            handles = [hvd.allreduce_async(torch.ones(2), name=n, op=hvd.Sum, process_set=alone) for n in names]
            assert left == names
        hvd.remove_process_set(alone)
        for handle in handles:
            try:
                assert torch.equal(hvd.synchronize(handle), torch.ones(2))
            except hvd.HorovodInternalError as e:  # and not ValueError, since it was submitted before
                assert "removed while it was in flight" in str(e)
