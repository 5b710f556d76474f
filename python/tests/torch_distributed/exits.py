"""The process ends while a callback runs: well, or by an error that leaves the callback's operation alone."""

import atexit
import sys
import threading
import time
from datetime import timedelta

import by_name  # noqa: F401
import torch
import torch.distributed as dist

dist.init_process_group("paceline", timeout=timedelta(seconds=600))
rank = dist.get_rank()
begun = threading.Event()


def goes_on(future):
    """Chains another callback when the main thread has ended."""
    begun.set()
    while not threading._SHUTTING_DOWN:
        time.sleep(0.01)
    inner = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda f: f.value()[0])
    print(f"rank {rank} has {inner.wait().item()}\n", end="", flush=True)


def waits(future):
    """Waits for what comes no more."""
    begun.set()
    try:
        dist.all_reduce(torch.ones(1))
    except dist.DistBackendError:
        print(f"rank {rank} has an error\n", end="", flush=True)


def last():
    print(f"rank {rank} at last {chained()}\n", end="", flush=True)
    dist.all_reduce(torch.ones(1), async_op=True).get_future().then(nobody_waits)
    begun.wait()


def nobody_waits(future):
    """Still runs when the last handler of atexit has returned."""
    begun.set()
    time.sleep(0.5)  # for the handler to return
    future.then(ends)


def ends(future):
    time.sleep(0.5)  # for the end of the process, if it did not wait for this too
    print(f"rank {rank} has ended\n", end="", flush=True)


def chained():
    return dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda f: f.value()[0].item()).wait()


def train():
    for _ in range(10):
        time.sleep(0.05)
        chained()
    print(f"rank {rank} has trained\n", end="", flush=True)


work = dist.all_reduce(torch.ones(4), async_op=True)
if sys.argv[1] == "thread":
    chained()
    if sys.version_info < (3, 12):  # which starts no thread there
        atexit.register(last)
    threading.Thread(target=train).start()
elif sys.argv[1] == "well":
    work.get_future().then(goes_on)
    begun.wait()
else:
    if rank == 0:
        work.get_future().then(waits)
        begun.wait()
        if sys.argv[1] == "exit":
            sys.exit("the program's error")
        raise RuntimeError("the program's error")
    work.wait()
    time.sleep(600)  # torchrun ends it
