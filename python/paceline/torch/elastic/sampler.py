"""A sampler whose epoch goes on with other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from paceline.common.sampling import Shares, share
from paceline.torch.mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank its share of the samples that no rank has processed in this epoch.

    Make it part of a TorchState, call `record_batch` after each batch, and `set_epoch` at the end of each epoch. After
    a change of the ranks it deals out the rest of the epoch anew.

    dataset: data of a constant length. shuffle: in another order each epoch, the same on every rank. seed: the same on
    every rank. `remaining_indices`: not processed when the ranks last changed; `num_samples`: of this rank;
    `total_size`: of all ranks, with some samples twice so that all ranks have as many.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch. Call it at the end of the one before, so that nothing is processed twice after a change."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Counts a batch as processed, on every rank. batch_idx: Horovod's, without effect."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its samples all ranks have processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where another sampler was."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deals out what is not processed among the ranks that there are now."""
        self.num_replicas, self.rank = size(), rank()
        shares = Shares(len(self.dataset), self.shuffle, self.seed)
        self.remaining_indices = shares.remaining(self.epoch, self.processed_num)
        self.indices = share(self.remaining_indices, self.rank, self.num_replicas)
        self.num_samples = len(self.indices)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
