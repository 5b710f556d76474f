"""How often training steps wake threads."""

import os
import resource

import torch
from torch import nn

import paceline.torch as hvd

LAYERS = 20
STEPS = 5  # in a block. Where cores are taken away a step has more batches, so that few blocks of many steps are quiet.
BLOCKS = 2400  # of which one on each rank has to be quiet


def test_a_batch_of_gradients_wakes_two_threads_on_each_side(job, size):
    network = nn.Sequential(*[m for _ in range(LAYERS) for m in (nn.Linear(64, 64), nn.ReLU())])
    named = [(f"switches.{name}", p) for name, p in network.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.01), named_parameters=named)
    inputs = torch.ones(4, 64)

    def train():
        """Context switches of a step, of all threads and of this one, because they had to wait."""
        before = [resource.getrusage(who).ru_nvcsw for who in (resource.RUSAGE_SELF, resource.RUSAGE_THREAD)]
        for _ in range(STEPS):
            optimizer.zero_grad()
            network(inputs).sum().backward()
            optimizer.step()
        after = [resource.getrusage(who).ru_nvcsw for who in (resource.RUSAGE_SELF, resource.RUSAGE_THREAD)]
        return [(b - a) / STEPS for a, b in zip(before, after, strict=True)]

    # A rank sends a batch to each other rank's server and gets its sums, and its own server does the same for them: two
    # switches for each, and two for the thread that trains, which waits once. Where cores are free gradients leave as
    # they come, in more batches.
    most = 2 + 4 * (size - 1) if len(os.sched_getaffinity(0)) <= size else 2 * LAYERS
    train()
    every, training = [], []
    for _ in range(BLOCKS):
        of_every, of_training = train()
        every.append(of_every)
        training.append(of_training)
        quiet = torch.tensor(int(min(every) <= most and min(training) <= 2))
        if hvd.allreduce(quiet, op=hvd.Min, name="switches.quiet").item():
            return
    raise AssertionError(
        f"at least {min(every)} context switches in a step of {2 * LAYERS} tensors, at most {most} are expected; "
        f"{min(training)} of the thread that trains, of 2"
    )
