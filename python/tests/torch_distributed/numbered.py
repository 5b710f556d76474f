"""Groups after one that its member alone has made, also in a second life of the default group; two ranks."""

import by_name  # noqa: F401
import lives
import torch
import torch.distributed as dist

for _ in range(2):
    lives.begin("paceline")
    rank = dist.get_rank()
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    tensors = [torch.full((2,), 10.0**i) for i in range(3)]
    works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, groups, strict=True)]
    for work in works:
        work.wait()
    assert [t[0].item() for t in tensors] == [2, 20, 200], tensors
    if rank == 0:
        dist.send(torch.ones(1), 1, groups[1])
    else:
        dist.recv(torch.ones(1), 0, groups[1])
    dist.monitored_barrier(groups[2])
    dist.destroy_process_group()
print(f"rank {rank} is done\n", end="")
