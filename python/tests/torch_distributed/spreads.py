"""Broadcasts that are sums, in an elastic job: spreads.py [DEVICE].

One in a callback stays one while the program's own thread has its broadcasts be sums.
"""

import sys
import threading
from datetime import timedelta

import by_name  # noqa: F401
import torch
import torch.distributed as dist

from paceline.torch.distributed import stand_in

dist.init_process_group("paceline", timeout=timedelta(seconds=60))
rank = dist.get_rank()
backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
spreads, over = threading.Event(), threading.Event()


def broadcast(_):
    (spreads if rank == 0 else over).wait()
    tensor = torch.full((2,), float(rank))
    dist.broadcast(tensor, 1)
    return tensor


future = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(broadcast)
with stand_in.spreading(backend):
    spreads.set()
    if rank == 0:
        assert torch.equal(future.wait(), torch.ones(2))
over.set()
assert torch.equal(future.wait(), torch.ones(2))

buffers = [torch.full((2,), float(rank)), torch.tensor(rank == 0), torch.full((3,), rank, dtype=torch.int64)]
buffers = [b.to(device) for device in ["cpu", *sys.argv[1:]] for b in buffers]
stand_in.spread(backend, buffers, 0)
assert [b.reshape(-1)[0].item() for b in buffers[:3]] == [0.0, True, 0], buffers
assert all(torch.equal(b.cpu(), buffers[i % 3]) for i, b in enumerate(buffers)), buffers
print(f"rank {rank} is done\n", end="", flush=True)
dist.destroy_process_group()
