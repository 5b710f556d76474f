"""Residual networks for small pictures (He et al. 2015), by their blocks of two layers."""

import torch
from torch import nn


class Block(nn.Module):
    """Two layers and a shortcut, which is the identity where the number of channels stays."""

    def __init__(self, before, after, shortcut):
        super().__init__()
        stride = 1 if before == after else 2
        self.layers = nn.Sequential(*layer(before, after, 3, stride), nn.ReLU(), *layer(after, after, 3, 1))
        self.shortcut = nn.Identity() if before == after else shortcut(before, after)

    def forward(self, x):
        """The sum of the layers and the shortcut."""
        return torch.relu(self.layers(x) + self.shortcut(x))


def projection(before, after):
    """A shortcut with parameters, as in ResNet-18."""
    return nn.Sequential(*layer(before, after, 1, 2))


class Padding(nn.Module):
    """A shortcut without parameters, whose further channels are zero, as in section 4.2."""

    def __init__(self, before, after):
        super().__init__()
        self.more = after - before

    def forward(self, x):
        """Every other row and column of x, and the further channels."""
        return nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.more))


def resnet(channels, widths, shortcut, classes):
    """A block from each width to the next, for pictures with so many channels."""
    blocks = [Block(before, after, shortcut) for before, after in zip([widths[0], *widths], widths, strict=False)]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)]
    return nn.Sequential(*layer(channels, widths[0], 3, 1), nn.ReLU(), *blocks, *end)


def layer(before, after, size, stride):
    """A convolution and its normalisation."""
    return nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after)
