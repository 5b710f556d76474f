"""A network in training on one rank, as the studies with real models need it."""

import time

import torch
from torch import nn


class Training:
    """Trains a network on this rank's part of the data. Keeps copies of its parameters, to be looked at afterwards.

    seed: of the order of the data and of dropout. batch: images of one gradient. keep: iterations from one copy to
    the next; 0: none.
    """

    def __init__(self, network, optimizer, data, rank, size, seed, batch, keep):
        self.network, self.optimizer, self.keep = network, optimizer, keep
        self.test_set = data[1]
        self.copies, self.done = [], 0
        torch.manual_seed(1000 * seed + rank)
        self._batches = _batches(data[0][rank::size], batch, torch.Generator().manual_seed(1000 * seed + rank))

    def iterate(self, extra=0, lr=None):
        """One iteration, with `extra` gradients that do not count before it. Returns when it was begun and ended.

        lr: the learning rate of this iteration, if not the optimizer's.
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
        """Keeps a copy of the parameters, once for an iteration."""
        if not self.copies or self.copies[-1][0] != self.done:
            self.copies.append((self.done, {k: v.clone() for k, v in self.network.state_dict().items()}))

    @torch.no_grad()
    def accuracies(self):
        """The test accuracy of each copy that is kept, with the number of its iteration. Lets go of the copies."""
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
    """Batches for ever, each image once before any comes again."""
    images, labels = part
    order = torch.empty(0, dtype=torch.int64)
    while True:
        if len(order) < batch:
            order = torch.cat([order, torch.randperm(len(images), generator=generator)])
        now, order = order[:batch], order[batch:]
        yield images[now], labels[now]
