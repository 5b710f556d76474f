"""DistributedDataParallel in an elastic job of three ranks that goes on without one: lost.py VICTIM plain|codec."""

import copy
import os
import signal
import sys

import by_name  # noqa: F401
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

victim, codec = int(sys.argv[1]), sys.argv[2] == "codec"
dist.init_process_group("paceline")
rank, size = dist.get_rank(), dist.get_world_size()
left = [r for r in range(size) if r != victim]
torch.manual_seed(rank)
dense = torch.nn.Sequential(torch.nn.Linear(4, 300_000), torch.nn.BatchNorm1d(300_000))
rows = torch.nn.Embedding(10, 3, sparse=True)
models = [DistributedDataParallel(dense)] + ([] if codec else [DistributedDataParallel(rows)])
models.append(copy.deepcopy(DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))).eval())  # as in fine-tuning


def near(a, b):
    return torch.allclose(a, torch.full_like(a, b), rtol=0.02)


def check_step(ranks):
    """The gradient of a bias is a rank's number, and one in a row of its own."""
    for model in models:
        model.zero_grad()
    (models[0](torch.randn(2, 4)).sum() * (rank + 1) / 2).backward()
    mean = sum(r + 1 for r in ranks) / len(ranks)
    assert near(dense[1].bias.grad, mean), (dense[1].bias.grad[:5], mean)
    models[-1](torch.full((1, 1), rank + 1.0)).sum().backward()
    assert near(models[-1].module.weight.grad, mean), (models[-1].module.weight.grad, mean)
    if not codec:
        models[1](torch.tensor([rank])).sum().backward()
        assert rows.weight.grad.to_dense()[:size, 0].tolist() == [
            torch.tensor(1 / len(ranks)).item() if r in ranks else 0 for r in range(size)
        ], rows.weight.grad


check_step(range(size))
dist.barrier()
if rank == victim:
    os.kill(os.getpid(), signal.SIGKILL)
ones = torch.zeros(1)
while ones != len(left):
    dist.all_reduce(ones.fill_(1))
for _ in range(4):  # buckets are made anew before the first
    dense[1].running_mean.fill_(rank)
    check_step(left)
    seen = dense[1].running_mean.mean()
    assert abs(seen - 0.9 * left[0]) < 0.1, seen  # the lowest's, and a tenth of what this batch adds

mean = torch.tensor(rank + 0.5)
dist.all_reduce(mean, dist.ReduceOp.AVG)
assert mean == sum(r + 0.5 for r in left) / len(left), mean
bits = torch.tensor([7 - (1 << rank)])
dist.all_reduce(bits, dist.ReduceOp.BAND)
assert bits == 1 << victim, bits
for gather in (
    lambda: dist.all_gather([torch.empty(2) for _ in range(size)], torch.ones(2)),
    lambda: dist.all_gather_object([None] * size, "something"),
):
    try:
        gather()
    except RuntimeError as error:
        assert f"rank {victim} of group" in str(error) and "is lost" in str(error), error
    else:
        raise AssertionError("the tensor of the lost rank came")
print(f"rank {rank} went on\n", end="", flush=True)
os._exit(0)  # the store, where destroy_process_group would look, may be gone
