"""The numbers of elements of a model's gradients in the order of backward: the last layer first."""


def _resnet50():
    sizes = [3 * 64 * 7 * 7, 64, 64]  # the first convolution, its batch norm's weight and bias
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            wide = 4 * width
            sizes += [channels * width, width, width, 9 * width * width, width, width, width * wide, wide, wide]
            if block == 0:
                sizes += [channels * wide, wide, wide]  # the shortcut's own convolution
            channels = wide
    return [*sizes, channels * 1000, 1000][::-1]


RESNET50 = _resnet50()


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
