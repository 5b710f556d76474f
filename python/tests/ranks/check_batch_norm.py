"""SyncBatchNorm against torch's batch normalisation of the union of all ranks' batches."""

import pytest
import torch

import paceline.torch as hvd

SHAPES = {"NC": (), "NCL": (5,), "NCHW": (4, 3), "NCDHW": (2, 3, 2)}
PLAIN = {0: torch.nn.BatchNorm1d, 1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}
CHANNELS = 3


def batches(counts, inner, dtype):
    """Every rank's batch, far from zero, where a naive sum of squares cancels."""
    return [torch.randn(n, CHANNELS, *inner, dtype=torch.float64).mul(2).add(100).to(dtype) for n in counts]


def pair(inner, dtype, **options):
    plain = PLAIN[len(inner)](CHANNELS, **options).to(dtype)
    if plain.affine:
        torch.nn.init.uniform_(plain.weight)
        torch.nn.init.uniform_(plain.bias)
    ours = hvd.SyncBatchNorm(CHANNELS, **options).to(dtype)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sizes", ["even", "uneven", "one without samples"])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_equals_batch_norm_on_the_union(shape, sizes, options, rank, size):
    inner = SHAPES[shape]
    counts = {"even": [4] * size, "uneven": [2 + r for r in range(size)], "one without samples": [0] + [5] * (size - 1)}
    plain, ours = pair(inner, torch.float64, **options)
    for _ in range(3):
        everyones = batches(counts[sizes], inner, torch.float64)
        union = torch.cat(everyones).requires_grad_()
        mine = everyones[rank].clone().requires_grad_()
        weights = torch.randn_like(union)
        part = slice(sum(counts[sizes][:rank]), sum(counts[sizes][: rank + 1]))

        (plain(union) * weights).sum().backward()
        output = ours(mine)
        (output * weights[part]).sum().backward()

        close = {"rtol": 1e-10, "atol": 1e-10}
        torch.testing.assert_close(output, plain_output(plain, union)[part], **close)
        torch.testing.assert_close(mine.grad, union.grad[part], **close)
        if plain.affine:
            for name in ("weight", "bias"):
                total = hvd.allreduce(getattr(ours, name).grad, op=hvd.Sum)
                torch.testing.assert_close(total, getattr(plain, name).grad, **close)
                getattr(ours, name).grad = getattr(plain, name).grad = None
        if plain.track_running_stats:
            torch.testing.assert_close(ours.running_mean, plain.running_mean, **close)
            torch.testing.assert_close(ours.running_var, plain.running_var, **close)
            assert ours.num_batches_tracked == plain.num_batches_tracked

    ours.eval(), plain.eval()
    everyones = batches(counts[sizes], inner, torch.float64)
    part = everyones[rank]
    expected = plain(torch.cat(everyones))[sum(counts[sizes][:rank]) : sum(counts[sizes][: rank + 1])]
    torch.testing.assert_close(ours(part), expected, **close)


def plain_output(plain, x):
    """The plain layer's output for x, without another update of its running statistics."""
    return torch.nn.functional.batch_norm(x, None, None, plain.weight, plain.bias, True, 0.0, plain.eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_smaller_types_keep_their_type(dtype, rank, size):
    plain, ours = pair((4, 3), torch.float32)
    everyones = batches([3] * size, (4, 3), dtype)
    mine = everyones[rank].clone().requires_grad_()
    output = ours(mine)
    output.float().square().sum().backward()
    assert output.dtype == dtype and mine.grad.dtype == dtype
    expected = plain(torch.cat(everyones).float()).split(3)[rank]
    torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=2e-2)


def test_second_derivatives_are_an_error(rank):
    layer = hvd.SyncBatchNorm(3)
    x = torch.rand(4, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_wrong_inputs_are_refused(rank):
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        hvd.SyncBatchNorm(3)(torch.ones(3))
    with pytest.raises(ValueError, match="more than one value per channel"):
        hvd.SyncBatchNorm(3)(torch.ones(1 if rank == 0 else 0, 3))
