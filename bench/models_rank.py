"""One rank of models.py: trains the digits model under the synchronisation models that it is told.

It takes commands as rank.py does: the methods that COMMANDS names.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import paceline
import paceline.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from digits import digits, network

BATCH = 32
LEARNING_RATE = 1e-3  # Adam's, times the root of the number of ranks, as in the example
KEEP = 5  # iterations from one copy of rank 0's parameters to the next


class Rank:
    """The commands. Each of them has its answer when this rank has ended it, whatever the others do."""

    def __init__(self):
        self.train_set, self.test_set = digits()
        self.runs = 0

    def pin(self):
        """Gives the last rank a core of its own where there are two.

        Binds the thread that computes and no other: the server in this process answers from any core.
        """
        *others, last = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, [last] if hvd.rank() == hvd.size() - 1 else others or [last])
        return {}

    def tally(self):
        """What the server in this process has counted so far."""
        return paceline.tally()

    def prepare(self, sync, seed):
        """Makes the network and its optimizer, the same on every rank, and shuffles this rank's part of the data."""
        self.runs += 1
        torch.manual_seed(seed)
        self.network = network()
        named = [(f"{self.runs}.{name}", p) for name, p in self.network.named_parameters()]
        optimizer = torch.optim.Adam(self.network.parameters(), lr=LEARNING_RATE * hvd.size() ** 0.5)
        self.optimizer = hvd.DistributedOptimizer(optimizer, named, sync=eval(sync, vars(paceline)))
        torch.manual_seed(1000 * seed + hvd.rank())  # of dropout, and of the order of the data
        return {}

    def train(self, iterations, work):
        """Trains. The last rank computes each gradient `work` times over. Rank 0 keeps copies of its parameters.

        Answers with the times at which the gradients that count were begun, and at which each iteration ended, in
        seconds of the host's clock.
        """
        images, labels = self.train_set[hvd.rank() :: hvd.size()]
        order = torch.cat([torch.randperm(len(images)) for _ in range(iterations * BATCH // len(images) + 1)])
        self.network.train()
        self.copies = []
        extra = work - 1 if hvd.rank() == hvd.size() - 1 else 0
        begun, ended = [], []
        for i in range(iterations):
            batch = order[i * BATCH : (i + 1) * BATCH]
            for _ in range(extra):
                torch.autograd.grad(self.loss(images[batch], labels[batch]), list(self.network.parameters()))
            begun.append(time.monotonic())
            self.optimizer.zero_grad()
            self.loss(images[batch], labels[batch]).backward()
            self.optimizer.step()
            ended.append(time.monotonic())
            if hvd.rank() == 0 and ((i + 1) % KEEP == 0 or i + 1 == iterations):
                self.copies.append((ended[-1], {k: v.clone() for k, v in self.network.state_dict().items()}))
        return {"begun": begun, "ended": ended}

    def loss(self, images, labels):
        """Of a batch."""
        return nn.functional.cross_entropy(self.network(images), labels)

    @torch.no_grad()
    def accuracies(self):
        """The test accuracy of each copy of the parameters, with the time at which it was made."""
        self.network.eval()
        images, labels = self.test_set[:]
        answer = []
        for when, copy in self.copies:
            self.network.load_state_dict(copy)
            answer.append((when, (self.network(images).argmax(1) == labels).float().mean().item()))
        return {"accuracies": answer}


COMMANDS = ("pin", "tally", "prepare", "train", "accuracies")


def main():
    """Obeys until the input ends."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        torch.set_num_threads(1)
        hvd.init()
        rank = Rank()
        print(json.dumps({"torch": torch.__version__, "kernel": os.uname().release}), file=answers)
        for line in sys.stdin:
            command = json.loads(line)
            what = command.pop("what")
            assert what in COMMANDS, what
            print(json.dumps(getattr(rank, what)(**command)), file=answers)
        hvd.shutdown()


if __name__ == "__main__":
    main()
