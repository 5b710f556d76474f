"""Groups beside a default group of another backend, as trainings on GPUs have one for tensors in host memory."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import Backend

ours, devices = sys.argv[1], sys.argv[2]
Backend.register_backend(
    "another", lambda store, rank, size, limit: ProcessGroupGloo(store, rank, size, limit), devices=["cpu", "cuda"]
)


def total(group):
    tensor = torch.full((3,), 10.0 ** dist.get_rank())
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


store, rank, size = next(dist.rendezvous("env://"))
for life in range(2):
    # Gloo finds its peers of an earlier life in a store that it has used before.
    lives = dist.PrefixStore(f"life {life}", store)
    dist.init_process_group("another", store=lives, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    if life == 0:
        try:
            dist.new_group([rank], backend=devices, use_local_synchronization=True)
            raise AssertionError("members alone have begun a world")
        except dist.DistBackendError as e:
            assert "Call new_group(backend=" in str(e), e
    if ours == "paceline":  # which is not registered before a rank makes a group
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
    assert type(backend).__name__ == "PacelineBackend" and backend.getBackendName() == ours, backend
    dist.monitored_barrier(whole)
    dist.destroy_process_group()
    if life == 0:
        from paceline.common.engine import engine

        assert not engine.is_initialized()
print(f"rank {rank} is done\n", end="")
