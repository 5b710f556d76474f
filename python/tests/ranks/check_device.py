"""Tensors on a GPU, or on the tests' own device, through pinned host memory and in the order of their streams."""

import contextlib

import offhost  # noqa: F401
import pytest
import torch

import paceline
import paceline.torch as hvd
from paceline.torch._memory import host_room
from paceline.torch.elastic import state as elastic


@pytest.fixture
def device(rank):
    own = torch.device(
        torch.accelerator.current_accelerator().type, hvd.local_rank() % torch.accelerator.device_count()
    )
    torch.accelerator.set_device_index(own)
    return own


def equal(on_device, expected):
    return not on_device.is_cpu and torch.equal(on_device.cpu(), expected)


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


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_work_that_is_queued_before_and_after_keeps_its_order(device, rank, size, strided):
    total, rows = [size * (size + 1) / 2], [float(r + 1) for r in range(size)]
    calls = [
        (lambda x: hvd.allreduce_async_(x, op=hvd.Sum), total * size),
        (lambda x: hvd.allreduce_async(x, op=hvd.Sum), total * size),
        (lambda x: hvd.allgather_async(x[:1]), rows),
        (lambda x: hvd.broadcast_async_(x, size - 1), [float(size)] * size),
        (lambda x: hvd.alltoall_async(x, [1] * size), rows),
        (lambda x: hvd.reducescatter_async(x, op=hvd.Sum), total),
    ]
    n = 1 << 20 if device.type == "cuda" else 5
    for i, (start, values) in enumerate(calls):
        x = torch.full((size, n), rank + 1.0, device=device)
        x = x.t().contiguous().t() if strided else x
        torch.accelerator.current_stream().synchronize()
        with torch.Stream(device) as stream:
            if device.type == "cuda":
                torch.cuda._sleep(100_000_000)  # what follows is still to be done when the operation is asked for
            before = torch.empty_like(x).copy_(x)
            output = hvd.synchronize(start(x))
            output = output[0] if isinstance(output, tuple) else output
            after = torch.empty_like(output).copy_(output)
        stream.synchronize()
        assert equal(before, torch.full((size, n), rank + 1.0)), i
        assert equal(after, torch.tensor(values)[:, None].expand(-1, n)), i


def test_strides_and_empty_tensors(device, rank, size):
    x = torch.full((2, 3, 4, 4), float(rank), device=device).to(memory_format=torch.channels_last)
    strides = x.stride()
    hvd.allreduce_(x, op=hvd.Sum)
    assert x.stride() == strides and equal(x, torch.full((2, 3, 4, 4), size * (size - 1) / 2))
    assert hvd.allreduce(torch.empty(0, 3, device=device)).shape == (0, 3)
    assert hvd.allgather(torch.empty(0, 3, device=device)).device == device
    assert host_room(x).is_pinned() and not host_room(x.cpu()).is_pinned()


def net(device):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double().to(device)


def train(model, optimizer, device, mine):
    torch.manual_seed(4)
    for _ in range(5):
        x = torch.rand(24, 4, dtype=torch.float64).to(device)
        optimizer.zero_grad()
        model(x[mine]).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("where", ["default stream", "own stream"])
@pytest.mark.parametrize(
    "options",
    [{}, {"cross_barrier": True}, {"num_groups": 1}, {"gradients_in_arena": True}, {"sync": paceline.SSP(0)}],
    ids=["plain", "cross barrier", "grouped", "arena", "held"],
)
def test_training(device, rank, size, options, where):
    model, alone = net(device), net(device)
    kind = torch.optim.SGD if "sync" in options else torch.optim.Adam
    optimizer = hvd.DistributedOptimizer(kind(model.parameters(), lr=0.01), model.named_parameters(), **options)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    each = 24 // size
    torch.accelerator.current_stream().synchronize()
    with torch.Stream(device) if where == "own stream" else contextlib.nullcontext():
        train(model, optimizer, device, slice(each * rank, each * (rank + 1)))
        if "sync" in options:
            optimizer.agree()
        train(alone, kind(alone.parameters(), lr=0.01), device, slice(None))
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        hvd.broadcast_optimizer_state(optimizer, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.topk(0.5)},
        {"compression": "int8"},
        {"op": hvd.Adasum},
        {"wait_free": True},
        {"sync": paceline.SSP(1)},
        {"sync": paceline.SSP(1, cached=True)},
        {"sync": paceline.SSP(1), "gate": paceline.Significance(1e-9)},
    ],
    ids=["fp16", "topk", "int8", "adasum", "wait-free", "ssp", "cached", "gate"],
)
def test_every_kind_of_training_ends_with_the_same_parameters(device, rank, size, options):
    model = net(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), **options
    )
    hvd.broadcast_parameters(model.state_dict(), 0)
    each = 24 // size
    train(model, optimizer, device, slice(each * rank, each * (rank + 1)))
    if "sync" in options or "wait_free" in options:
        optimizer.agree()
    for p, begun in zip(model.parameters(), net("cpu").parameters(), strict=True):
        everybody = hvd.allgather(p.detach().reshape(1, -1)).cpu()
        assert (everybody == everybody[0]).all() and not torch.equal(everybody[0], begun.detach().reshape(-1))


def test_batch_norm(device, rank, size):
    plain, ours = torch.nn.BatchNorm2d(3).double().to(device), hvd.SyncBatchNorm(3).double().to(device)
    union = torch.randn(4 * size, 3, 2, 2, dtype=torch.float64).to(device)
    mine = slice(4 * rank, 4 * rank + 4)
    torch.testing.assert_close(ours(union[mine]), plain(union)[mine], rtol=1e-10, atol=1e-10)


def test_batch_norm_on_two_devices_at_once(device, rank, size):
    """Backward has a thread for each device."""
    norms = [hvd.SyncBatchNorm(3).double().to(d) for d in (device, "cpu")]
    plain = [torch.nn.BatchNorm1d(3).double().to(d) for d in (device, "cpu")]
    mine = slice(4 * rank, 4 * rank + 4)
    for _ in range(20):
        unions = [torch.randn(4 * size, 3, dtype=torch.float64).to(d).requires_grad_() for d in (device, "cpu")]
        own = [u.detach()[mine].clone().requires_grad_() for u in unions]
        for inputs, layers in ((unions, plain), (own, norms)):
            first, second = (layer(x).pow(3).sum() for layer, x in zip(layers, inputs, strict=True))
            torch.autograd.backward([first, second])
        for union, x in zip(unions, own, strict=True):
            torch.testing.assert_close(x.grad, union.grad[mine], rtol=1e-8, atol=1e-8)


def test_options_that_are_tensors_stay_where_they_are(device, rank, monkeypatch):
    def made():
        rates = [torch.tensor(0.5 * (rank + 1), device=d) for d in (device, "cpu")]
        return rates, torch.optim.SGD(
            [{"params": [torch.nn.Parameter(torch.ones(2, device=device))], "lr": rate} for rate in rates]
        )

    rates, optimizer = made()
    hvd.broadcast_optimizer_state(optimizer, 1)
    given = [group["lr"] for group in optimizer.param_groups]
    assert given[0] is rates[0] and [rate.item() for rate in given] == [1.0, 1.0]
    schedule = torch.optim.lr_scheduler.StepLR(made()[1], 1)
    monkeypatch.setattr(elastic.LRSchedulerStateHandler, "save", lambda _: None)  # the tests' device copies no storages
    elastic.LRSchedulerStateHandler(schedule).sync()
    assert [base.item() for base in schedule.base_lrs] == [0.5, 0.5]
    assert [t.device for t in (*given, *schedule.base_lrs)] == 2 * [device, torch.device("cpu")]


def test_groups_that_share_a_rate_get_two_where_the_root_has_two(device, rank):
    rate = torch.tensor(0.25, device=device)
    groups = [{"params": [torch.nn.Parameter(torch.ones(2, device=device))]} for _ in range(3)]
    optimizer = torch.optim.SGD(groups, lr=rate)
    for group in optimizer.param_groups:
        group["lr"] = rate
    if rank == 0:
        optimizer.param_groups[1]["lr"] = torch.tensor(0.5, device=device)
    hvd.broadcast_optimizer_state(optimizer, 0)
    given = [group["lr"] for group in optimizer.param_groups]
    assert [g.item() for g in given] == [0.25, 0.5, 0.25] and given[0] is given[2] is rate


def test_gradients_of_a_group_are_made_in_several_streams(device, rank, size):
    """Each layer's backward has the stream of its forward."""
    for _ in range(5):
        params = [torch.nn.Parameter(torch.zeros(3, device=device)) for _ in range(4)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), num_groups=1, op=hvd.Sum)
        torch.accelerator.current_stream().synchronize()
        total = torch.zeros((), device=device)
        sums = []
        for i, p in enumerate(params):
            with torch.Stream(device) as stream:
                if device.type == "cuda":
                    torch.cuda._sleep(10_000_000)
                sums.append((i + 1) * (rank + 1) * p.sum())  # whose gradient a copy makes
            torch.accelerator.current_stream().wait_stream(stream)
        for s in sums:
            total = total + s
        total.backward()
        optimizer.step()
        for i, p in enumerate(params):
            assert equal(p.detach(), torch.full((3,), -(i + 1.0) * size * (size + 1) / 2)), (i, p)


def test_sparse_gradients(device, size):
    if device.type == "offhost":
        pytest.skip("the device has no sparse tensors")
    embedding = torch.nn.Embedding(10, 3, sparse=True).to(device)
    torch.nn.init.zeros_(embedding.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), op=hvd.Sum)
    embedding(torch.tensor([5], device=device)).sum().backward()
    optimizer.step()
    assert equal(embedding.weight[5].detach(), torch.full((3,), -float(size)))
