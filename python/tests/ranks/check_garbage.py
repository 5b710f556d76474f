"""What training steps leave to Python's collector."""

import gc
import tracemalloc
from pathlib import Path

import torch
from torch import nn

import paceline
import paceline.torch as hvd

STEPS = 40


def test_steps_leave_nothing_to_the_collector(job):
    network = nn.Sequential(*[m for _ in range(20) for m in (nn.Linear(16, 16), nn.ReLU())])
    named = [(f"garbage.{name}", p) for name, p in network.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.01), named_parameters=named)
    inputs = torch.ones(4, 16)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            network(inputs).sum().backward()
            optimizer.step()

    train(10)
    collections = []
    tracemalloc.start()
    try:
        train(2)
        gc.collect()
        before = tracemalloc.take_snapshot()
        gc.callbacks.append(lambda phase, info: collections.append(info["collected"]) if phase == "stop" else None)
        train(STEPS)
        gc.collect()
        gc.callbacks.pop()
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    own = tracemalloc.Filter(True, f"{Path(paceline.__file__).parent}/*")
    grown = after.filter_traces([own]).compare_to(before.filter_traces([own]), "lineno")
    assert sum(line.size_diff for line in grown) < 100 * STEPS, [str(line) for line in grown[:5]]
    assert sum(collections) == 0, "steps made cycles"
    assert len(collections) <= 3, "the collector ran within the steps, beside once at their end"
