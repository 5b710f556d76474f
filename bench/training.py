"""A network in training on one rank, for the studies with real models."""

import time

import torch
from torch import nn


class Training:
    """Trains a network on this rank's part of the data. Keeps copies of its parameters, to evaluate them afterwards.

    seed: of the order of the data and of dropout. batch: images per gradient. keep: iterations between copies; 0: no
    copies.
    """

    def __init__(self, network, optimizer, data, rank, size, seed, batch, keep):
        self.network, self.optimizer, self.keep = network, optimizer, keep
        self.test_set = data[1]
        self.copies, self.done = [], 0
        torch.manual_seed(1000 * seed + rank)
        self._batches = _batches(data[0][rank::size], batch, torch.Generator().manual_seed(1000 * seed + rank))

    def iterate(self, extra=0, lr=None):
        """One iteration, after `extra` gradients that are not used. Returns the times of its begin and end.

        lr: this iteration's learning rate, by default the optimizer's.
        """
        images, labels = next(self._batches)
        self.network.train()
        for _ in range(extra):
            torch.autograd.grad(self._loss(images, labels), list(self.network.parameters()))
        for group in self.optimizer.param_groups if lr is not None else ():
            group["lr"] = lr
        begun = time.monotonic()
        self.optimizer.zero_grad()
        self._loss(images, labels).backward()
        self.optimizer.step()
        ended = time.monotonic()
        self.done += 1
        if self.keep and self.done % self.keep == 0:
            self.copy()
        return begun, ended

    def copy(self):
        """Keeps a copy of the parameters, once per iteration."""
        if not self.copies or self.copies[-1][0] != self.done:
            self.copies.append((self.done, {k: v.clone() for k, v in self.network.state_dict().items()}))

    @torch.no_grad()
    def accuracies(self):
        """The test accuracy of each copy, with its iteration. Drops the copies."""
        self.network.eval()
        images, labels = self.test_set[:]
        answer = []
        for done, copy in self.copies:
            found = torch.func.functional_call(self.network, copy, images).argmax(1)
            answer.append((done, (found == labels).float().mean().item()))
        self.copies = []
        return answer

    def _loss(self, images, labels):
        return nn.functional.cross_entropy(self.network(images), labels)


def _batches(part, batch, generator):
    """Endless batches, in which no image repeats before all have occurred."""
    images, labels = part
    order = torch.empty(0, dtype=torch.int64)
    while True:
        if len(order) < batch:
            order = torch.cat([order, torch.randperm(len(images), generator=generator)])
        now, order = order[:batch], order[batch:]
        yield images[now], labels[now]
