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


def alone(rank):
    """Whether this is rank 0, once all others have joined. The others call join."""
    while rank == 0 and hvd.allreduce(torch.ones(1), op=hvd.Sum, name="alone again").item() > 1:
        pass
    return rank == 0


def test_minimum_maximum_and_product_heed_the_zeros(rank, size):
    if alone(rank):
        for op, want in ((hvd.Min, -2.0), (hvd.Max, 0.0), (hvd.Product, 0.0), (hvd.Adasum, -2.0)):
            assert torch.equal(hvd.allreduce(torch.full((3,), -2.0), op=op), torch.full((3,), want))
    hvd.join()


NEED_ALL = {
    "allgather": lambda x: hvd.allgather(x, name="needs all"),
    "grouped_allgather": lambda x: hvd.grouped_allgather([x, x]),
    "allgather_object": hvd.allgather_object,
    "broadcast": lambda x: hvd.broadcast(x, 0),
    "broadcast_": lambda x: hvd.broadcast_(x, 0, name="needs all"),
    "broadcast_object": hvd.broadcast_object,
    "alltoall": hvd.alltoall,
    "reducescatter": lambda x: hvd.reducescatter(x, name="needs all"),
    "grouped_reducescatter": lambda x: hvd.grouped_reducescatter([x, x]),
    "sparse_allreduce": lambda x: hvd.sparse_allreduce_async(x.to_sparse(), name="needs all", op=hvd.Sum)(),
}


@pytest.mark.parametrize("operation", NEED_ALL)
def test_operations_that_need_every_rank_fail_while_one_has_joined(operation, rank, size):
    if alone(rank):
        for _ in range(2):
            with pytest.raises(hvd.HorovodInternalError, match="needs every rank, and"):
                NEED_ALL[operation](torch.ones(size))
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="alone again").item() == 1
    assert hvd.join() == 0
    assert torch.equal(hvd.allgather(torch.tensor([rank]), name="needs all"), torch.arange(size))


def test_what_every_rank_has_begun_before_a_join_is_done(rank, size):
    gathered = hvd.allgather_async(torch.tensor([rank]))
    shared = hvd.broadcast_async(torch.tensor([rank]), size - 1)
    hvd.join()
    assert hvd.synchronize(gathered).tolist() == list(range(size))
    assert hvd.synchronize(shared).item() == size - 1


@pytest.mark.parametrize("sync", ["ssp:3", "asp"])
def test_agree_after_a_join_gives_the_parameters_of_the_last_rank(sync, rank, size):
    """A join empties the servers. Where training goes on instead, it begins with these too."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [(f"joined {sync}", weight)], sync=sync)

    def step(times):
        for _ in range(times):
            weight.grad = torch.full((3,), -1.0 - rank)
            optimizer.step()

    step(3 + rank % 2)
    last = hvd.join()
    newest = hvd.broadcast(weight.detach(), last, name="newest")
    optimizer.agree()
    assert torch.equal(weight.detach(), newest)
    step(2)
    optimizer.agree()
    assert torch.equal(weight.detach(), newest + 2 * sum(r + 1 for r in range(size)) / size)
    step(1)
    last = hvd.join()
    newest = hvd.broadcast(weight.detach(), last, name="newest")
    step(1)
    optimizer.agree()
    assert torch.equal(weight.detach(), newest + sum(r + 1 for r in range(size)) / size)
