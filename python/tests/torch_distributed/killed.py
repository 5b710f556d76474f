"""A rank that is killed: what the others say of operations that wait for it, with hvd.init() before or without."""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

if sys.argv[1] == "hvd":
    import paceline.torch as hvd

    hvd.init()
dist.init_process_group("paceline", timeout=timedelta(seconds=60))
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
calls = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
    "recv": lambda: dist.recv(torch.ones(4), 2),
    "send": lambda: dist.send(torch.ones(1 << 22), 2),
    "barrier": dist.barrier,
}
for name, call in calls.items():
    try:
        call()
    except dist.DistBackendError as e:
        print(f"{name}: {e}\n", end="", flush=True)
os._exit(0)  # the job is broken: nothing to leave in order
