"""A work that has ended has its future's value, however late the thread that completes it is."""

import time
from datetime import timedelta

import by_name  # noqa: F401
import torch
import torch.distributed as dist

from paceline.torch.distributed.callbacks import WorkFuture

dist.init_process_group("paceline", timeout=timedelta(seconds=30))
rank = dist.get_rank()
complete = WorkFuture.complete


def late(self, outputs, failure):
    time.sleep(0.02)
    complete(self, outputs, failure)


def ends(work):
    """Waits for it. Returns its error."""
    try:
        work.wait()
    except dist.DistBackendError as e:
        return e


def polls(work):
    """Asks until it has ended. Returns its error."""
    while not work.is_completed():
        time.sleep(0.0001)
    return work.exception()


WorkFuture.complete = late
for ended in (ends, polls) * 5:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert ended(work) is None
    assert torch.equal(work.get_future().value()[0], torch.full((3,), 2.0)), ended

    work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
    assert "ranks disagree" in str(ended(work)), ended
    try:
        work.get_future().value()
        raise SystemExit("ranks of different shapes agree")
    except dist.DistBackendError as e:
        assert "ranks disagree" in str(e), e
print(f"rank {rank} is done\n", end="", flush=True)
dist.destroy_process_group()
