"""PyTorch's built-in communication hooks, and uneven inputs divided by the ranks that still have some, on two ranks."""

import os
import sys

import by_name  # noqa: F401
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(sys.argv[1])
rank = dist.get_rank()
grads = []


def model():
    return DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))


def step(model):
    model.zero_grad()
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    grads.append(model.module.weight.grad.item())


for kind in dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS:
    hooked = model()
    hooked(torch.ones(1, 1))  # before the hook: a script may try its model first
    hooked._register_builtin_comm_hook(kind)
    step(hooked)
for initial in True, False:
    uneven = model()
    with uneven.join(divide_by_initial_world_size=initial):
        for _ in range(1 + 2 * rank):
            step(uneven)
print(f"rank {rank} {grads}\n", end="", flush=True)  # one write: the ranks share the output
if sys.argv[1] == "gloo":
    dist.barrier()
    os._exit(0)  # threads of Gloo's that models keep abort one process of six as the interpreter ends
dist.destroy_process_group()
