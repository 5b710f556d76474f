"""CUDA tensors, through pinned host memory and in the order of their streams. Skipped where there is no GPU."""

import pytest
import torch

import paceline.torch as hvd

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture
def device(rank):
    return torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())


def equal(on_device, expected):
    return on_device.is_cuda and torch.equal(on_device.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_collective(dtype, device, rank, size):
    total = torch.full((2 * size, 3), size * (size + 1) // 2).to(dtype)
    mine = torch.full((2 * size, 3), rank + 1, device=device).to(dtype)
    ranks = torch.arange(1, size + 1).to(dtype)
    assert equal(hvd.allreduce(mine, op=hvd.Sum), total)
    assert equal(hvd.grouped_allreduce([mine, mine], op=hvd.Sum)[1], total)
    assert equal(hvd.reducescatter(mine, op=hvd.Sum), total[:2])
    assert equal(hvd.allgather(mine[:1, 0]), ranks)
    assert equal(hvd.alltoall(mine[:size, 0].contiguous()), ranks)
    received, splits = hvd.alltoall(mine[:size, 0], torch.ones(size, dtype=torch.int32, device=device))
    assert equal(received, ranks) and equal(splits, torch.ones(size, dtype=torch.int32))
    assert equal(hvd.broadcast(mine, size - 1), torch.full_like(total, size))
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine and equal(mine, total)


def test_work_that_is_queued_before_and_after_keeps_its_order(device, size):
    x = torch.zeros(1 << 22, device=device)
    for step in range(5):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(50):
                x.add_(1.0)  # still running when the reduction is asked for
            handle = hvd.allreduce_async_(x, op=hvd.Average)
            hvd.synchronize(handle)
            x.add_(0.0)
        torch.cuda.current_stream(device).wait_stream(stream)
        assert torch.equal(x, torch.full_like(x, 50.0 * (step + 1)))


def test_strides_and_empty_tensors(device, rank, size):
    x = torch.full((2, 3, 4, 4), float(rank), device=device).contiguous(memory_format=torch.channels_last)
    strides = x.stride()
    hvd.allreduce_(x, op=hvd.Sum)
    assert x.stride() == strides and equal(x, torch.full((2, 3, 4, 4), size * (size - 1) / 2))
    assert hvd.allreduce(torch.empty(0, 3, device=device)).shape == (0, 3)
    assert hvd.allgather(torch.empty(0, 3, device=device)).is_cuda


def test_training(device, rank, size):
    def net():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double().to(device)

    model, alone = net(), net()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    lonely = torch.optim.Adam(alone.parameters(), lr=0.01)
    for _ in range(5):
        x = torch.rand(6 * size, 4, dtype=torch.float64).to(device)
        optimizer.zero_grad(), lonely.zero_grad()
        model(x[6 * rank : 6 * rank + 6]).square().mean().backward()
        alone(x).square().mean().backward()
        optimizer.step(), lonely.step()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    hvd.broadcast_optimizer_state(optimizer, 0)


def test_batch_norm_and_sparse_gradients(device, rank, size):
    plain, ours = torch.nn.BatchNorm2d(3).double().to(device), hvd.SyncBatchNorm(3).double().to(device)
    union = torch.randn(4 * size, 3, 2, 2, dtype=torch.float64).to(device)
    mine = slice(4 * rank, 4 * rank + 4)
    torch.testing.assert_close(ours(union[mine]), plain(union)[mine], rtol=1e-10, atol=1e-10)
    embedding = torch.nn.Embedding(10, 3, sparse=True).to(device)
    torch.nn.init.zeros_(embedding.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), op=hvd.Sum)
    embedding(torch.tensor([5], device=device)).sum().backward()
    optimizer.step()
    assert equal(embedding.weight[5].detach(), torch.full((3,), -float(size)))
