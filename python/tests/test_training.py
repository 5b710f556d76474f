"""Training with N ranks equals training alone with the N-fold batch."""

from pathlib import Path

import pytest
import torch
from jobs import Job

CODE = """
import sys, torch
import paceline.torch as hvd
sys.path.insert(0, {directory!r})
from test_training import train
hvd.init()
trained = [train(hvd.rank(), hvd.size(), dtype, hvd) for dtype in (torch.float64, torch.float32)]
torch.save(trained, "{out}/" + str(hvd.rank()) + ".pt")
"""


def train(rank, size, dtype, hvd=None):
    """Trains a small network on the rank's part of the data; without hvd on all of it. Returns the parameters."""
    torch.manual_seed(0 if rank == 0 else rank)  # rank 0's parameters are everybody's
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 10)
    ).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * (1 + rank), momentum=0.9, weight_decay=1e-4)
    if hvd is not None:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    generator = torch.Generator().manual_seed(42)
    for _ in range(20):
        x = torch.rand(24 * 5, 1, 8, 8, dtype=torch.float64, generator=generator).to(dtype)
        y = torch.randint(0, 10, (24 * 5,), generator=generator)
        part = slice(rank * len(x) // size, (rank + 1) * len(x) // size) if hvd is not None else slice(None)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_training_with_n_ranks_equals_training_alone(size, tmp_path):
    with Job(
        size, ["-c", CODE.format(directory=str(Path(__file__).parent), out=tmp_path)], tmp_path, fresh=True
    ) as job:
        job.succeed()
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for i, (dtype, tolerance) in enumerate([(torch.float64, 1e-12), (torch.float32, 1e-5)]):
        for ours, alone in zip(ranks[0][i], train(0, 1, dtype), strict=True):
            torch.testing.assert_close(ours, alone, rtol=tolerance, atol=tolerance)
        for other in ranks[1:]:  # all ranks bit by bit alike
            assert all(torch.equal(a, b) for a, b in zip(ranks[0][i], other[i], strict=True))
