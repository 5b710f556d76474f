"""Models as lists of layers: the number of elements of each of a layer's tensors, and its multiplications.

A layer is (elements, work): elements of its parameters in the order in which the model has them, and the
multiplications of its forward pass for one example.
"""

import functools
import json
import subprocess

TOKENS = 128  # of an example of BERT


def _resnet50():
    """He et al. 2015, table 1, with the stride in the 3 x 3 convolution. One image of 224 x 224 pixels."""

    def convolution(inputs, outputs, kernel, side):
        weights = inputs * outputs * kernel * kernel
        return (weights, outputs, outputs), weights * side * side  # with its batch norm's weight and bias

    layers, channels, side = [convolution(3, 64, 7, 112)], 64, 56
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            before, wide = side, 4 * width
            side = before // 2 if block == 0 and width > 64 else before
            layers.append(convolution(channels, width, 1, before))
            layers += [convolution(width, width, 3, side), convolution(width, wide, 1, side)]
            if block == 0:
                layers.append(convolution(channels, wide, 1, side))  # the shortcut's own
            channels = wide
    return [*layers, ((channels * 1000, 1000), channels * 1000)]


def _bert_base():
    """Devlin et al. 2018: 12 layers of 768, with the pooler."""
    width, inner = 768, 3072

    def linear(inputs, outputs, tokens=TOKENS):
        return (inputs * outputs, outputs), inputs * outputs * tokens

    norm = (width, width), width * TOKENS
    layers = [((30522 * width, 512 * width, 2 * width), width * TOKENS), norm]
    for _ in range(12):
        layers += [linear(width, width)] * 3
        (elements, work) = linear(width, width)
        layers += [(elements, work + 2 * TOKENS * TOKENS * width), norm]  # after attention's own products
        layers += [linear(width, inner), linear(inner, width), norm]
    return [*layers, linear(width, width, 1)]


RESNET50_LAYERS = _resnet50()
BERT_BASE_LAYERS = _bert_base()
RESNET50 = [n for elements, _ in RESNET50_LAYERS for n in elements][::-1]  # in the order of backward: the last first


@functools.cache
def gradients():
    """The elements of each gradient of `paceline bench placement`'s models, in the order of backward."""
    listed = subprocess.run(["paceline", "bench", "shapes", "--json"], check=True, capture_output=True, text=True)
    return {shape["model"]: shape["elements"][::-1] for shape in json.loads(listed.stdout)}


def buckets(sizes, limit):
    """Lists of indices of `sizes`, in order. A list ends with the tensor that brings its sum to the limit or above."""
    members, room = [], 0
    for i, n in enumerate(sizes):
        members.append(i)
        room += n
        if room >= limit:
            yield members
            members, room = [], 0
    if members:
        yield members
