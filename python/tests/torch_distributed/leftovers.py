"""Works that end before their operations, and barriers that a rank misses: on two ranks, under torchrun."""

import gc
import threading
import weakref
from datetime import timedelta

import by_name  # noqa: F401
import lives
import torch
import torch.distributed as dist

SHORT = timedelta(milliseconds=200)  # for what never comes
HANG_S = 600  # less than the operations' own timeout


def fails(call, *words):
    try:
        call()
    except RuntimeError as e:
        assert all(word in str(e) for word in words), e
    else:
        raise AssertionError(f"no error that says {words}")


def receive(group, tag):
    """A receive into memory of the backend's own, and what is set when that is gone."""
    work, gone = dist.irecv(torch.zeros(4, 2).t(), 1, group=group, tag=tag), threading.Event()
    weakref.finalize(work._memory[0].host, gone.set)
    return work, gone


def times_out(work, other, group):
    for each in (work, other):
        fails(lambda each=each: each.wait(SHORT), "Timed out", "recv")


def is_aborted(work, other, group):
    future, told = work.get_future(), threading.Event()
    future.add_done_callback(lambda _: told.set())
    group._get_backend(torch.device("cpu")).abort()
    assert told.wait(HANG_S), "the future waits for the timeout"
    fails(future.wait, "aborted")
    assert other.is_completed() and not other.is_success() and "aborted" in str(other.exception())
    fails(work.wait, "aborted", "recv")
    fails(lambda: dist.irecv(torch.zeros(1), 1, group=group), "aborted")


def ends_early(rank, ends):
    group = dist.new_group([0, 1])
    if rank == 0:
        (work, gone), (other, gone_too) = (receive(group, tag) for tag in range(2))
        ends(work, other, group)
        del work, other
        gc.collect()
        assert not gone.is_set() and not gone_too.is_set()  # the engine may still write
    dist.barrier()
    if rank == 1:
        for tag in range(2):
            dist.send(torch.ones(2, 4), 0, group=group, tag=tag)
    dist.barrier()
    if rank == 0:
        assert gone.wait(HANG_S) and gone_too.wait(HANG_S), "the memory is kept after the receives have ended"


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


def missed_operation(rank):
    """The error of an operation to which a rank does not come in time names it, on all ranks."""
    group, ones = dist.new_group([0, 1], timeout=timedelta(seconds=3)), torch.ones(2)
    for comes in (0, 1):
        if rank == comes:
            fails(
                lambda: dist.all_reduce(ones, group=group),
                "Timed out waiting 3s: ",
                "on rank 0 has waited 3s for its end, its timeout: rank 1 did not come",
            )
        dist.barrier()
    dist.all_reduce(ones, group=group)
    assert ones.tolist() == [2, 2], ones


def misfits(rank):
    """A receive of another size or type is an error on both ranks, which says what each has."""
    sent = torch.zeros(4)
    for into, room in (
        (torch.zeros(8), "32 bytes (8 of float32)"),
        (torch.zeros(2), "8 bytes (2 of float32)"),
        (torch.zeros(16, dtype=torch.uint8), "16 bytes (16 of uint8)"),
    ):
        fails(lambda into=into: dist.recv(into, 0) if rank else dist.send(sent, 1), "16 bytes (4 of float32)", room)


def main():
    lives.begin("paceline")
    rank = dist.get_rank()
    dist.monitored_barrier()  # the first operation of this world
    dist.destroy_process_group()
    lives.begin("paceline")
    if rank == 0:  # the other comes too in the world before only
        fails(lambda: dist.monitored_barrier(timeout=SHORT), "Rank 1 failed to pass monitoredBarrier")
    else:
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).group.count += 1
    dist.barrier()
    for ends in (times_out, is_aborted):
        ends_early(rank, ends)
    missed_barriers(rank)
    missed_operation(rank)
    misfits(rank)
    dist.destroy_process_group()
    print(f"rank {rank} is done\n", end="", flush=True)


if __name__ == "__main__":
    main()
