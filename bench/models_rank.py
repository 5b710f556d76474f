"""One rank of models.py: trains the digits model under a synchronisation model. commands.py has the protocol."""

import os
import sys
from pathlib import Path

import torch
from commands import obey
from training import Training

import paceline
import paceline.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from digits import digits, network

BATCH = 32
LEARNING_RATE = 1e-3  # Adam's, times the square root of the number of ranks, as in the example
KEEP = 5  # iterations from one copy of rank 0's parameters to the next


class Rank:
    """The commands. A rank answers when it has ended a command, independently of the others."""

    def __init__(self):
        self.data = digits()
        self.runs = 0

    def pin(self):
        """Gives the last rank a core of its own if there are at least two.

        Binds only the thread that computes: the server in this process uses all cores.
        """
        *others, last = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, [last] if hvd.rank() == hvd.size() - 1 else others or [last])
        return {}

    def tally(self):
        """The counts of the server in this process."""
        return paceline.tally()

    def prepare(self, sync, seed):
        """Makes the network and its optimizer, the same on every rank, and shuffles this rank's part of the data."""
        self.runs += 1
        torch.manual_seed(seed)
        model = network()
        named = [(f"{self.runs}.{name}", p) for name, p in model.named_parameters()]
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE * hvd.size() ** 0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, named, sync=eval(sync, vars(paceline)))
        keep = KEEP if hvd.rank() == 0 else 0
        self.training = Training(model, optimizer, self.data, hvd.rank(), hvd.size(), seed, BATCH, keep)
        return {}

    def train(self, iterations, work):
        """Trains. The last rank computes each gradient `work` times over. Rank 0 keeps copies of its parameters.

        Answers with the times at which each iteration's last gradient was begun, and at which it ended, in seconds of
        the host's clock.
        """
        extra = work - 1 if hvd.rank() == hvd.size() - 1 else 0
        begun, ended = zip(*(self.training.iterate(extra) for _ in range(iterations)), strict=True)
        if hvd.rank() == 0:
            self.training.copy()
        return {"begun": begun, "ended": ended}

    def accuracies(self):
        """The test accuracy of each copy of the parameters, with its iteration."""
        return {"accuracies": self.training.accuracies()}


def begin():
    """Joins the job."""
    hvd.init()
    return Rank(), {}, hvd.shutdown


if __name__ == "__main__":
    obey(begin, ("pin", "tally", "prepare", "train", "accuracies"))
