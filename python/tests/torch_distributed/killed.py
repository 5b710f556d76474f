"""A rank that is killed: what the others say of operations that wait for it, with hvd.init() before or without."""

import contextlib
import os
import signal
import sys
from datetime import timedelta

import by_name  # noqa: F401
import torch
import torch.distributed as dist

if sys.argv[1] == "hvd":
    import paceline.torch as hvd

    hvd.init()
dist.init_process_group("paceline", timeout=timedelta(seconds=600))
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
store = dist.distributed_c10d._get_default_store()
store.set(f"has the sum {rank}", "")
if rank == 2:  # which owes nobody the sum
    store.wait([f"has the sum {other}" for other in range(2)])
    os.kill(os.getpid(), signal.SIGKILL)
calls = {
    "monitored_barrier": dist.monitored_barrier,
    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
    "recv": lambda: dist.recv(torch.ones(4), 2),
    "send": lambda: dist.send(torch.ones(1 << 22), 2),
    "barrier": dist.barrier,
}
for name, call in calls.items():
    try:
        call()
    except RuntimeError as e:
        assert isinstance(e, dist.DistBackendError) or name == "monitored_barrier"  # where Gloo's class is this, too
        print(f"{name}: {str(e).replace(chr(10), ' ')}\n", end="", flush=True)
store.set(f"is done {rank}", "")
with contextlib.suppress(dist.DistError):  # the store ends with rank 0, which then is done
    store.wait([f"is done {1 - rank}"])  # so that nobody blames this rank
os._exit(0)  # the job is broken: nothing to leave in order
