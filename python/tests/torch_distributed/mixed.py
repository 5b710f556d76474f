"""A group that has Gloo for the CPU and Paceline for a device: mixed.py DEVICE, with PACELINE_COMPRESSION."""

import sys

import by_name  # noqa: F401
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

DEVICE = sys.argv[1]

dist.init_process_group(f"cpu:gloo,{DEVICE}:paceline")
for where, hooks in (("cpu", []), (DEVICE, ["ddp_hook"])):
    x = torch.full((3,), 1.0 + dist.get_rank(), device=where)
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 3
    model = DistributedDataParallel(torch.nn.Linear(4, 2).to(where))
    model(torch.full((1, 4), 1.0 + dist.get_rank(), device=where)).sum().backward()
    assert [hook.__name__ for hook, _ in model._comm_hooks] == hooks
    assert torch.allclose(model.module.weight.grad.cpu(), torch.tensor(1.5))
print(f"rank {dist.get_rank()} is done\n", end="", flush=True)
dist.destroy_process_group()
