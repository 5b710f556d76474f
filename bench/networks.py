"""The networks of step.py and overlap.py. Each has batches of its own; those of simulated models are empty."""

import sys
import time
from pathlib import Path

import shapes
import torch
from resnet import Padding, resnet
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from digits import network as digits

UNIT = 256  # rows and columns of the matrices whose products are simulated computing
BATCHES = 4


def resnet14(width):
    """He et al. 2015, section 4.2, with n = 2: for ten classes of pictures with three channels."""
    return resnet(3, [w for w in (width, 2 * width, 4 * width) for _ in range(2)], Padding, 10)


def deep(layers, width):
    """Many small linear layers."""
    return nn.Sequential(
        *[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())], nn.Linear(width, 10)
    )


class Simulated(nn.Sequential):
    """A model's shapes: every layer computes for as long as its work takes, and gives a gradient of known values.

    work: examples whose multiplications a layer does, for which no activations are needed. compute: does so many.
    """

    def __init__(self, layers, work, seed, compute):
        values = torch.randn(max(n for elements, _ in layers for n in elements), generator=_generator(seed))
        super().__init__(*[_Layer(elements, work * of, values, compute) for elements, of in layers])


class _Layer(nn.Module):
    def __init__(self, elements, work, values, compute):
        super().__init__()
        self.tensors = nn.ParameterList(torch.zeros(n) for n in elements)
        self.work, self.values, self.compute = work, values, compute

    def forward(self, x):
        """A number without a meaning, shape (1,), for x of that shape."""
        return _Compute.apply(x, self.work, self.values, self.compute, *self.tensors)


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, work, values, compute, *parameters):
        ctx.work, ctx.values, ctx.compute, ctx.shapes = work, values, compute, [p.shape for p in parameters]
        compute(work)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.compute(2 * ctx.work)
        factor = gradient.item()
        return gradient, None, None, None, *(ctx.values[: s.numel()].view(s) * factor for s in ctx.shapes)


_LEFT, _RIGHT = torch.rand(2, UNIT, UNIT)
_PRODUCT = torch.empty(UNIT, UNIT)


def multiply(work):
    """Products of matrices with about so many multiplications."""
    rows = round(work / UNIT**2)
    while rows > 0:
        now = min(rows, UNIT)
        torch.mm(_LEFT[:now], _RIGHT, out=_PRODUCT[:now])
        rows -= now


def _generator(seed):
    return torch.Generator().manual_seed(seed)


def _pictures(batch, shape):
    def batches(seed):
        generator = _generator(seed)
        pairs = range(BATCHES)
        return [(torch.rand(batch, *shape, generator=generator), _labels(batch, generator)) for _ in pairs]

    return batches


def _labels(batch, generator):
    return torch.randint(10, (batch,), generator=generator)


def _factors(seed):
    """The factors of a simulated model's gradients."""
    return [(1 + torch.rand(1, generator=_generator(seed * BATCHES + i)), None) for i in range(BATCHES)]


def _real(network, batch, shape):
    return lambda work, rank: network(), _pictures(batch, shape), nn.functional.cross_entropy


def _simulated(layers):
    return lambda work, rank: Simulated(layers, work, rank, multiply), _factors, lambda out, _: out.sum()


def _elsewhere(layers):
    """Another processor computes for `work` seconds in each step, two thirds of them in backward."""
    total = 3 * sum(of for _, of in layers)
    return lambda work, rank: Simulated(layers, work / total, rank, time.sleep), _factors, lambda out, _: out.sum()


# By name: what makes the network, from the examples of simulated computing and the rank; what makes a rank's batches,
# from a seed; the loss.
NETWORKS = {
    "digits": _real(digits, 32, (1, 8, 8)),
    "small": _real(lambda: resnet14(16), 16, (3, 16, 16)),
    "wide": _real(lambda: resnet14(64), 4, (3, 16, 16)),
    "deep": _real(lambda: deep(60, 128), 64, (128,)),
    "resnet50": _simulated(shapes.RESNET50_LAYERS),
    "resnet50 elsewhere": _elsewhere(shapes.RESNET50_LAYERS),
    "stage": _simulated(shapes.RESNET50_LAYERS[:11]),  # ResNet-50's first, for a quick look
    "bert": _simulated(shapes.BERT_BASE_LAYERS),
}
