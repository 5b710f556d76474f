"""Collectives that compiled code calls: `compiled_calls.py BACKEND` prints what each gives on this rank; two ranks."""

import sys

import by_name  # noqa: F401
import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1])
rank = dist.get_rank()
group = dist.new_group([0, 1])


def broadcast(x):
    dist.broadcast(x, 0)
    return x + 1


def reduce(x):
    dist.reduce(x, 0)
    return x + 1 if rank == 0 else x * 0  # elsewhere Gloo leaves what it has added up


def all_reduce(x):
    work = dist.all_reduce(x, dist.ReduceOp.MAX, group, async_op=True)
    work.wait()
    return x + 1


def all_gather(x):
    parts = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(parts, x)
    return parts[0] - parts[1]


def message(x):
    work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
    work.wait()
    return x + 1


for call in (broadcast, reduce, all_reduce, all_gather, message):
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager")
    results = [compiled(torch.full((2,), float(rank + i))).tolist() for i in range(3)]
    sys.stdout.write(f"{rank} {call.__name__} {results}\n")
    sys.stdout.flush()
dist.barrier()
dist.destroy_process_group()
