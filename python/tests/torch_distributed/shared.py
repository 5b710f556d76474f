"""Default groups one after another in the job of hvd.init(): none has what one before left in engine or store."""

from datetime import timedelta

import by_name  # noqa: F401
import torch
import torch.distributed as dist

import paceline.torch as hvd

hvd.init()
store, rank, size = next(dist.rendezvous("env://"))
left = []


def begin():
    dist.init_process_group("paceline", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))


# Beside another backend's default group, where members alone make a group of ours.
dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=size)
dist.new_group([0], backend="paceline")
dist.barrier()  # Gloo's ranks have to be connected before one leaves
dist.destroy_process_group()

begin()
dist.monitored_barrier()
if rank == 0:
    left.append((dist.all_reduce(torch.full((2,), 100.0), async_op=True), None))
else:
    into = torch.zeros(2)
    left.append((dist.irecv(into, 0), into))
dist.destroy_process_group()

begin()
if rank == 1:
    try:
        dist.monitored_barrier(timeout=timedelta(milliseconds=200))
        raise SystemExit("the answer at the barrier before lets the rank pass")
    except RuntimeError as e:
        assert "no answer in 200 ms" in str(e), e
ones = torch.ones(2)
dist.all_reduce(ones)
assert ones.tolist() == [2, 2], ones
if rank == 0:
    dist.send(torch.ones(2), 1)
else:
    zeros = torch.zeros(2)
    dist.recv(zeros, 0)
    assert zeros.tolist() == [1, 1] and into.tolist() == [0, 0], (zeros, into)
dist.destroy_process_group()
hvd.shutdown()
print(f"rank {rank} is done\n", end="", flush=True)
