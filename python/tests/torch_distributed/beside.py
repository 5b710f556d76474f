"""Groups beside a default group of another backend, as trainings on GPUs have one for tensors in host memory."""

import gc
import sys
from datetime import timedelta

import by_name  # noqa: F401
import lives
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import Backend

import paceline.torch as hvd
from paceline.common.engine import engine

ours, devices = sys.argv[1], sys.argv[2]
# PyTorch keeps one of a group's two registered backends. The other would close its connections while peers still make
# theirs, which then fail.
kept = []


def another(store, rank, size, limit):
    kept.append(ProcessGroupGloo(store, rank, size, limit))
    return kept[-1]


Backend.register_backend("another", another, devices=["cpu", "cuda"])


def total(group):
    tensor = torch.full((3,), 10.0 ** dist.get_rank())
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def refused(ranks, **how):
    try:
        dist.new_group(ranks, backend=devices, **how)
        raise AssertionError("members alone have begun a world")
    except dist.DistBackendError as e:
        assert "Call new_group(backend=" in str(e), e


held = None
for life in range(3):
    lives.begin("another", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    refused([rank], use_local_synchronization=True)
    if ours == "paceline":  # which is not registered before a rank makes a group
        for _ in range(2):
            if rank < 2:
                refused([0, 1])
            else:
                dist.new_group([0, 1], backend=devices)
        whole = dist.new_group(backend=devices)
        pair = dist.new_group([0, 1], backend=devices)
    else:
        pair = dist.new_group([0, 1], backend=devices)
        whole = dist.new_group(backend=devices)
    if rank < 2:
        assert total(pair) == 11
        local = dist.new_group([0, 1], backend=devices, use_local_synchronization=True)
        assert total(local) == 11
    assert total(whole) == int("1" * size) == total(None)
    backend = whole._get_backend(torch.device("cpu"))
    assert type(backend).__name__ == "PacelineBackend" and backend.group.title == ours, backend
    assert backend.getBackendName() == (ours if torch.__version__ >= "2.14" else "custom")
    dist.monitored_barrier(whole)
    held = None  # of the life before: the engine runs for this one
    gc.collect()
    assert total(whole) == int("1" * size)
    if life == 1:
        held = dist.group.WORLD
    dist.destroy_process_group()
    assert engine.is_initialized() == (held is not None)

hvd.init()  # the engine runs on all ranks already
lives.begin("another", timeout=timedelta(seconds=60))
pair = dist.new_group([0, 1], backend=devices)
assert rank == 2 or total(pair) == 11
dist.destroy_process_group()
hvd.barrier()
hvd.shutdown()
print(f"rank {rank} is done\n", end="")
