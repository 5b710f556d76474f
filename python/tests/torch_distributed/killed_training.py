"""DistributedDataParallel on three ranks, of which the last is killed in a backward pass: killed_training.py WAY.

WAY: "plain"; "codec" for ddp_hook; "own" for a hook that waits for a future of the backend.
"""

import os
import signal
import sys

import by_name  # noqa: F401
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

KILLED, STEP = 2, 3


def average(_, bucket):
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def main():
    dist.init_process_group("paceline")
    layers = [torch.nn.Linear(512, 512) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    if sys.argv[1] == "codec":
        from paceline.torch.distributed import DDPState, ddp_hook

        model.register_comm_hook(DDPState("int8", model.module.named_parameters()), ddp_hook)
    elif sys.argv[1] == "own":
        model.register_comm_hook(None, average)
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    for step in range(STEP + 1):
        out = model(torch.ones(4, 512))
        if step == STEP:
            store.set(f"rank {rank} has the sums", "")
        if step == STEP and rank == KILLED:
            store.wait([f"rank {other} has the sums" for other in range(KILLED)])  # its server owes nobody any
            out.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        try:
            out.square().mean().backward()
        except RuntimeError as e:
            print(f"step {step}: {e}".replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
