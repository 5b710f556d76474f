"""Works that end before their operations, and barriers that a rank misses: on two ranks, under torchrun."""

import gc
import threading
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.torch.distributed.work import _left_behind

SHORT = timedelta(milliseconds=200)


def fails(call, *words):
    try:
        call()
    except RuntimeError as e:
        assert all(word in str(e) for word in words), e
    else:
        raise AssertionError(f"no error that says {words}")


def receive(group):
    """A receive into memory of the backend's own, and whether that is still there."""
    work = dist.irecv(torch.zeros(4, 2).t(), 1, group=group)
    return work, weakref.ref(work._memory[0].host)


def ends_early(rank, abort):
    group = dist.new_group([0, 1])
    if rank == 0:
        work, memory = receive(group)
        if abort:
            group._get_backend(torch.device("cpu")).abort()
            fails(work.wait, "aborted", "recv")
        else:
            fails(lambda: work.wait(SHORT), "Timed out", "recv")
        del work
        gc.collect()
        assert memory() is not None and len(_left_behind) == 1  # the engine may still write to it
        gone = threading.Event()
        weakref.finalize(memory(), gone.set)
    dist.barrier()
    if rank == 1:
        dist.send(torch.ones(2, 4), 0, group=group)
    dist.barrier()
    if rank == 0:
        assert gone.wait(60), "the memory is kept after the receive has ended"
        assert len(_left_behind) == 0


def missed_barriers(rank):
    if rank == 0:
        for wait_all in (False, True):
            fails(lambda: dist.monitored_barrier(timeout=SHORT, wait_all_ranks=wait_all), "[Rank 0]: Rank 1 failed")
    else:
        for _ in range(2):
            dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).group.count += 1
    dist.barrier()
    fails(lambda: dist.monitored_barrier(timeout=timedelta(0)), "monitoredBarrier")
    dist.barrier()
    dist.monitored_barrier()


def main():
    dist.init_process_group("paceline")
    rank = dist.get_rank()
    dist.monitored_barrier()  # the first operation of this world
    dist.destroy_process_group()
    dist.init_process_group("paceline")
    if rank == 0:  # the other comes too in the world before only
        fails(lambda: dist.monitored_barrier(timeout=SHORT), "Rank 1 failed to pass monitoredBarrier")
    else:
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).group.count += 1
    dist.barrier()
    for abort in (False, True):
        ends_early(rank, abort)
    missed_barriers(rank)
    dist.destroy_process_group()
    print(f"rank {rank} is done\n", end="", flush=True)


if __name__ == "__main__":
    main()
