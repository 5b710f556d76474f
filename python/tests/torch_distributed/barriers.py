"""Monitored barriers after one that a rank has missed, and after messages, which not all ranks have; two ranks.

Rank 0 has had a job of its own before, as a process has that goes on with new ones.
"""

import os
import re
from datetime import timedelta

import by_name  # noqa: F401
import torch
import torch.distributed as dist

if os.environ["RANK"] == "0":
    dist.init_process_group("paceline", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
dist.init_process_group("paceline", timeout=timedelta(seconds=20))
rank = dist.get_rank()
alone = dist.new_group([0])


def barrier():
    dist.monitored_barrier(timeout=timedelta(seconds=10))


if rank == 0:
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=1))
        raise SystemExit("no error")
    except RuntimeError as e:
        assert "Rank 1 failed to pass monitoredBarrier" in str(e), e
    dist.all_reduce(torch.ones(1), group=alone)
dist.all_reduce(torch.ones(1))
barrier()
barrier()
dist.barrier()
if rank == 0:
    dist.send(torch.ones(2), 1, tag=7)
else:
    dist.recv(torch.ones(2), 0, tag=7)
    try:
        dist.irecv(torch.ones(2), 0, tag=8).wait(timedelta(seconds=1))
        raise SystemExit("no error")
    except RuntimeError:
        pass
barrier()

# A message of another length is an error of both, which has the tag of the program.
try:
    if rank == 0:
        dist.send(torch.ones(3), 1, tag=9)
    else:
        dist.recv(torch.ones(2), 0, tag=9)
    raise SystemExit("no error")
except RuntimeError as e:
    assert re.search(r"tag 9\b", str(e)), e
barrier()

# What barriers leave in the store does not grow.
store = dist.distributed_c10d._get_default_store()
left = []
for _ in range(5):
    barrier()
    dist.barrier()
    left.append(store.num_keys())
    dist.barrier()
assert len(set(left)) == 1, left
print(f"rank {rank} is done\n", end="", flush=True)
dist.destroy_process_group()
