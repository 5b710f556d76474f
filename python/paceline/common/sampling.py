"""Which samples of an epoch are this rank's, where ranks come and go within the epoch."""

from __future__ import annotations

import random


class Shares:
    """The samples of an epoch that nobody has processed, in equal shares.

    length: samples of the data. shuffle: in an order that depends on seed + epoch, the same on every rank. Samples
    count as processed in that order: after n processed ones the first n belong to nobody.
    """

    def __init__(self, length: int, shuffle: bool, seed: int) -> None:
        self.length, self.shuffle, self.seed = length, shuffle, seed

    def remaining(self, epoch: int, processed: int) -> list[int]:
        """The indices that are not processed, in the epoch's order."""
        order = list(range(self.length))
        if self.shuffle:
            random.Random(self.seed + epoch).shuffle(order)
        return order[processed:]


def share(indices: list[int], rank: int, size: int) -> list[int]:
    """Every size-th index from a rank's on. All shares have one length: the first indices are repeated for that."""
    count = -(-len(indices) // size)
    padded = indices * (-(-count * size // len(indices))) if indices else []
    return padded[rank : count * size : size]
