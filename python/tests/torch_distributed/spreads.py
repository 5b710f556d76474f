"""A broadcast in a callback stays one while the program's own thread has its broadcasts be sums, in an elastic job."""

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
print(f"rank {rank} is done\n", end="", flush=True)
dist.destroy_process_group()
