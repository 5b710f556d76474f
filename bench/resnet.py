"""A small residual network with the shape of ResNet-18: a block of two layers on each of four scales."""

import torch
from torch import nn

WIDTH = 20  # channels of the first scale; each further one has twice as many


class Block(nn.Module):
    """Two layers and a shortcut."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.layers = nn.Sequential(*_layer(before, after, 3, stride), nn.ReLU(), *_layer(after, after, 3, 1))
        self.shortcut = nn.Identity() if before == after else nn.Sequential(*_layer(before, after, 1, stride))

    def forward(self, x):
        """The sum of the layers and the shortcut."""
        return torch.relu(self.layers(x) + self.shortcut(x))


def resnet(classes):
    """For pictures of one channel."""
    widths = [WIDTH << i for i in range(4)]
    blocks = [Block(a, b, 1 if a == b else 2) for a, b in zip([WIDTH, *widths], widths, strict=False)]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)]
    return nn.Sequential(*_layer(1, WIDTH, 3, 1), nn.ReLU(), *blocks, *end)


def _layer(before, after, size, stride):
    return nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after)
