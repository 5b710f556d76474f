"""Generated pictures of striped shapes: a data set that a small ResNet learns in a few hundred iterations.

A picture has 16 x 16 pixels, and its class is one of five shapes together with the direction of the stripes on it.
Position, size, angle, contrast and width of the stripes vary. The background has other stripes, a smaller shape may
cover a part, and a second picture and noise are added. 2 % of the labels are wrong.
"""

import math

import torch
from torch.utils.data import TensorDataset

SIDE, SHAPES, CLASSES = 16, 5, 10
TRAIN, TEST = 8192, 600
NOISE, SHINE, WRONG = 0.1, 0.15, 0.02


def pictures():
    """Training and test data, the same on every rank."""
    return _some(TRAIN, 1), _some(TEST, 2)


def _some(number, seed):
    generator = torch.Generator().manual_seed(seed)
    image, label = _drawn(number, generator)
    behind, _ = _drawn(number, generator)
    image += torch.rand(number, 1, 1, generator=generator) * SHINE * behind
    image += NOISE * torch.randn(image.shape, generator=generator)
    wrong = torch.rand(number, generator=generator) < WRONG
    label = torch.where(wrong, torch.randint(CLASSES, (number,), generator=generator), label)
    return TensorDataset(image.unsqueeze(1), label)


def _drawn(number, generator):
    """Pictures without noise, and their classes."""

    def vary(low, high):
        return torch.empty(number, 1, 1).uniform_(low, high, generator=generator)

    def choose(many):
        return torch.randint(many, (number,), generator=generator)

    def placed(shape, size):
        right, down = x - vary(-0.25, 0.25), y - vary(-0.25, 0.25)
        turn = vary(-0.2, 0.2)
        return _inside(shape, *((a / size) for a in _turned(right, down, turn)))

    def stripes(angle, low, high):
        return torch.sin(vary(low, high) * _turned(x, y, angle)[0] + vary(0, 2 * math.pi))

    place = torch.linspace(-1, 1, SIDE)
    y, x = torch.meshgrid(place, place, indexing="ij")
    shape, direction = choose(SHAPES), choose(2)
    on = stripes(vary(-0.3, 0.3) + direction.view(-1, 1, 1) * math.pi / 2, 6, 10)
    off = stripes(vary(0, math.pi), 3, 12)
    mask = placed(shape, vary(0.6, 0.85))
    image = mask * (0.6 + 0.8 * on) * vary(0.7, 1.3) + (1 - mask) * 0.35 * off * vary(0, 1)
    image += placed(choose(SHAPES), vary(0.2, 0.3)) * vary(-0.7, 0.7)
    return image, shape * 2 + direction


def _turned(x, y, angle):
    return x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()


def _inside(shape, x, y):
    """1 for points inside their picture's shape, else 0: disc, square, ring, cross or triangle."""
    r = torch.hypot(x, y)
    forms = [
        r < 0.95,
        (x.abs() < 0.8) & (y.abs() < 0.8),
        (r < 1.05) & (r > 0.55),
        (x.abs() < 0.35) & (y.abs() < 1.1) | (y.abs() < 0.35) & (x.abs() < 1.1),
        (y > -0.7) & (y < 1 - 1.9 * x.abs()),
    ]
    return torch.stack(forms)[shape, torch.arange(len(shape))].float()
