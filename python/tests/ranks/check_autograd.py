"""Gradients through every collective, by Horovod's definitions."""

import pytest
import torch

import paceline.torch as hvd


def of_rank(rank, *shape):
    """Numbers that depend on the rank, the same wherever they are asked for."""
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def mean_over_ranks(make):
    return torch.stack([make(r) for r in range(hvd.size())]).mean(0)


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_allreduce_reduces_the_gradient_alike(op, rank, size):
    x = of_rank(rank, 3, 4).requires_grad_()
    (hvd.allreduce(x, op=getattr(hvd, op)) * of_rank(10 + rank, 3, 4)).sum().backward()
    mean = mean_over_ranks(lambda r: of_rank(10 + r, 3, 4))
    torch.testing.assert_close(x.grad, mean * (size if op == "Sum" else 1))


def test_allreduce_scales_the_gradient_alike(rank):
    x = of_rank(rank, 5).requires_grad_()
    hvd.allreduce(x, prescale_factor=0.5, postscale_factor=3.0).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 1.5))


def test_fp16_compression_carries_gradients(rank):
    x = of_rank(rank, 5).float().requires_grad_()
    hvd.allreduce(x, compression=hvd.Compression.fp16).sum().backward()
    assert x.grad.dtype == torch.float32 and torch.equal(x.grad, torch.ones(5))


def test_grouped_allreduce_reduces_the_gradients_alike(rank, size):
    xs = [of_rank(rank + i, 2, i).requires_grad_() for i in (1, 3)]
    outputs = hvd.grouped_allreduce(xs, op=hvd.Sum)
    sum((y * of_rank(20 + rank, *y.shape)).sum() for y in outputs).backward()
    for x in xs:
        torch.testing.assert_close(x.grad, size * mean_over_ranks(lambda r, s=x.shape: of_rank(20 + r, *s)))


def rows_before(rank):
    return sum(r + 1 for r in range(rank))


def test_allgather_averages_the_gradient_and_cuts_out_its_rows(rank, size):
    x = of_rank(rank, rank + 1, 2).requires_grad_()
    total = rows_before(size)
    (hvd.allgather(x) * of_rank(30 + rank, total, 2)).sum().backward()
    mean = mean_over_ranks(lambda r: of_rank(30 + r, total, 2))
    torch.testing.assert_close(x.grad, mean[rows_before(rank) : rows_before(rank + 1)])


def test_grouped_allgather_averages_the_gradients_and_cuts_out_their_rows(rank, size):
    xs = [of_rank(rank, rank + 1, 2).requires_grad_(), of_rank(rank, 1, 3).requires_grad_()]
    first, second = hvd.grouped_allgather(xs)
    weights = of_rank(40 + rank, *first.shape)
    ((first * weights).sum() + 2 * second.sum()).backward()
    mean = mean_over_ranks(lambda r: of_rank(40 + r, *first.shape))
    torch.testing.assert_close(xs[0].grad, mean[rows_before(rank) : rows_before(rank + 1)])
    torch.testing.assert_close(xs[1].grad, torch.full_like(xs[1], 2.0))


def test_broadcast_gives_the_root_the_average_and_the_others_zeros(rank, size):
    x = of_rank(rank, 4).requires_grad_()
    root = size - 1
    (hvd.broadcast(x, root) * of_rank(50 + rank, 4)).sum().backward()
    expected = mean_over_ranks(lambda r: of_rank(50 + r, 4)) if rank == root else torch.zeros(4, dtype=torch.float64)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("with_splits", [False, True])
def test_alltoall_sends_the_gradient_back(with_splits, rank, size):
    rows = [(rank + r) % 2 + 1 for r in range(size)] if with_splits else [2] * size
    x = of_rank(rank, sum(rows) + (3 if with_splits else 0), 2).requires_grad_()
    received = hvd.alltoall(x, rows)[0] if with_splits else hvd.alltoall(x)
    (received * (rank + 1.0)).sum().backward()
    expected = torch.cat(
        [torch.full((n, 2), r + 1.0) for r, n in enumerate(rows)] + [torch.zeros(len(x) - sum(rows), 2)]
    )
    torch.testing.assert_close(x.grad, expected.double())


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_reducescatter_gathers_the_gradients(op, rank, size):
    x = of_rank(rank, 2 * size + 1, 3).requires_grad_()
    part = hvd.reducescatter(x, op=getattr(hvd, op))
    (part * (rank + 1.0)).sum().backward()
    counts = [3] + [2] * (size - 1)
    expected = torch.cat([torch.full((n, 3), r + 1.0) for r, n in enumerate(counts)])
    torch.testing.assert_close(x.grad, expected.double() * (size if op == "Sum" else 1))


def test_grouped_reducescatter_gathers_the_gradients(rank, size):
    xs = [of_rank(rank, size, 3).requires_grad_(), of_rank(rank, size * 2).requires_grad_()]
    a, b = hvd.grouped_reducescatter(xs, op=hvd.Sum)
    (a.sum() * (rank + 1.0) + b.sum()).backward()
    torch.testing.assert_close(xs[0].grad, size * torch.arange(1.0, size + 1).double().view(-1, 1).expand(-1, 3))
    torch.testing.assert_close(xs[1].grad, torch.full_like(xs[1], float(size)))


def test_gradients_stay_within_a_process_set(rank, size):
    ours = hvd.add_process_set(range(size // 2))
    if ours.included():
        x = of_rank(rank, 2).requires_grad_()
        hvd.allreduce(x, op=hvd.Sum, process_set=ours).sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, float(ours.size())))
    assert hvd.remove_process_set(ours)
