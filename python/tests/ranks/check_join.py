"""join: ranks with less data than others."""

import pytest
import torch

import paceline.torch as hvd


def test_join_returns_the_last_rank(rank, size):
    for last in (0, size - 1):
        if rank != last:
            assert hvd.join() == last
            continue
        while hvd.allreduce(torch.ones(1), op=hvd.Sum, name="who is here").item() > 1:
            pass  # until the others have joined
        assert hvd.join() == last


def test_joined_ranks_add_zeros(rank, size):
    sums = []
    for _ in range(rank + 1):
        sums.append(hvd.allreduce(torch.ones(3), op=hvd.Sum, name="uneven").tolist())
    hvd.join()
    # In step s the ranks s, s+1, ... still have data.
    assert sums == [[float(size - step)] * 3 for step in range(rank + 1)]


def test_zeros_count_in_averages(rank, size):
    if rank == 0:
        while hvd.allreduce(torch.ones(1), op=hvd.Sum, name="until alone").item() > 1:
            pass
        assert torch.equal(hvd.allreduce(torch.ones(3), name="alone"), torch.full((3,), 1 / size))
    hvd.join()


def test_after_join_all_goes_on(rank, size):
    assert hvd.join() in range(size)
    assert torch.equal(hvd.allreduce(torch.ones(2), op=hvd.Sum, name="uneven"), torch.full((2,), float(size)))
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))


def test_training_on_uneven_data(rank, size):
    net = torch.nn.Linear(3, 1)
    hvd.broadcast_parameters(net.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    for _ in range(2 + rank):
        optimizer.zero_grad()
        net(torch.rand(4, 3)).sum().backward()
        optimizer.step()
    assert hvd.join() in range(size)
    hvd.broadcast_parameters(net.state_dict(), size - 1)


def test_alltoall_is_refused_while_a_rank_has_joined(rank, size):
    if rank == 0:
        while hvd.allreduce(torch.ones(1), op=hvd.Sum, name="alone again").item() > 1:
            pass
        with pytest.raises(hvd.HorovodInternalError, match="joined"):
            hvd.alltoall(torch.ones(size))
    hvd.join()
