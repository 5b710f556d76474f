"""What a stream of the program's has still to do holds up what needs it alone: held.py DEVICE, two ranks."""

import faulthandler
import sys
import time
from datetime import timedelta

import by_name  # noqa: F401
import torch
import torch.distributed as dist

DEVICE = sys.argv[1]
faulthandler.dump_traceback_later(120, exit=True)


def hold():
    """Has the current stream stop here until it is released, or for seconds."""
    if DEVICE == "cuda":
        torch.cuda._sleep(10_000_000_000)
    else:
        torch.ops.offhost.hold()


def release():
    if DEVICE != "cuda":
        torch.ops.offhost.release()


def refuses(call, words):
    try:
        call()
    except dist.DistBackendError as e:
        assert words in str(e), e
    else:
        raise AssertionError(f"no error of {words}")


dist.init_process_group("paceline")
rank, stream, futures = dist.get_rank(), torch.Stream(DEVICE), dist.new_group()


def received(value):
    """A tensor, and the work that receives into it, whose message has come, behind what holds a stream."""
    x = torch.zeros(3, device=DEVICE)
    torch.accelerator.current_stream().synchronize()
    with stream:
        hold()
        work = dist.irecv(x, 1 - rank)
    dist.isend(torch.full((3,), value, device=DEVICE), 1 - rank).wait()
    dist.barrier()
    time.sleep(0.2)  # the library may tell of the end
    return x, work


x, work = received(4.0)
on_cpu = torch.ones(1)
dist.all_reduce(on_cpu, group=futures, async_op=True).get_future().wait()
assert on_cpu.item() == 2
assert not work.is_completed() and not work.get_future().done()
refuses(lambda: work.wait(timedelta(milliseconds=100)), "Timed out waiting 0.1 s")
release()
work.wait()
assert x.tolist() == [4, 4, 4], x

y = torch.full((2, 3), rank + 1.0, device=DEVICE).t().contiguous().t()
torch.accelerator.current_stream().synchronize()
with stream:
    works = [dist.all_reduce(y, async_op=True)]
    hold()  # what comes after the call
    works[0].wait()
    assert works[0].get_future().wait()[0] is y
    works[0].block_current_stream()
assert y.cpu().eq(3).all(), y
release()
stream.synchronize()

z, work = received(5.0)
dist.destroy_process_group()
refuses(work.wait, "in flight when its process group was")
release()
print(f"rank {rank} is done\n", end="", flush=True)
