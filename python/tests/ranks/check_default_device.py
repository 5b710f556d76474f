"""Scripts with torch.set_default_device("cuda"). "meta" has no memory: what has not named its device cannot be used."""

import pytest
import torch

import paceline
import paceline.torch as hvd


@pytest.fixture
def ones():
    return torch.ones(4, 3, device="cpu")


@pytest.fixture(autouse=True)
def default_device(ones):
    with torch.device("meta"):
        yield


def same(given, wanted):
    assert given.device.type == "cpu" and given.tolist() == wanted, given


def test_every_collective_of_tensors_on_the_cpu(ones, rank, size):
    same(hvd.allreduce(ones.t(), op=hvd.Sum), [[size] * 4] * 3)
    same(hvd.allgather(ones[:1]), [[1.0] * 3] * size)
    same(hvd.allgather(ones[:0]), [])
    same(hvd.broadcast(ones * rank, size - 1), [[size - 1] * 3] * 4)
    same(hvd.alltoall(ones), [[1.0] * 3] * 4)
    received, splits = hvd.alltoall(ones, [4 * (r == 0) for r in range(size)])
    assert len(received) == (4 * size if rank == 0 else 0)
    same(splits, [4 if rank == 0 else 0] * size)
    same(hvd.reducescatter(ones[:, :1], op=hvd.Sum), [[size]] * (4 // size))
    same(hvd.sparse_allreduce_async(ones.to_sparse(), "sparse", hvd.Sum)().to_dense(), [[size] * 3] * 4)
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.allgather_object(rank) == list(range(size))


@pytest.mark.parametrize("sync", [None, paceline.SSP(1), paceline.SSP(1, cached=True)], ids=["bsp", "ssp", "cached"])
def test_training_on_the_cpu(rank, size, sync):
    with torch.device("cpu"):
        model = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=sync is None), hvd.SyncBatchNorm(3))
        rows = torch.arange(4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), sync=sync)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    for _ in range(3):
        optimizer.zero_grad()
        model(rows).square().sum().backward()
        optimizer.step()
    if sync:
        optimizer.agree()
    everybody = hvd.allgather(model[0].weight.detach().reshape(1, -1))
    assert (everybody == everybody[0]).all()
