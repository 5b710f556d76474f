"""Operations of coalesced calls have their names until they are submitted, however many sizes a program has used."""

from datetime import timedelta

import by_name  # noqa: F401
import torch
import torch.distributed as dist

from paceline.torch.distributed import group

dist.init_process_group("paceline", timeout=timedelta(seconds=60))
prepared = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).group._making.prepared
for n in range(1, group._PREPARED):
    if len(prepared) >= group._PREPARED - 20:
        break
    dist.all_reduce(torch.ones(n))
tensors = [torch.ones(5000 + n) for n in range(40)]  # in the middle of which those that are prepared are forgotten
first = dist.all_reduce(torch.ones(1), async_op=True)
first.get_future().then(lambda _: dist.all_reduce_coalesced(tensors)).wait()
assert all(torch.equal(t, torch.full_like(t, 2)) for t in tensors)
print(f"rank {dist.get_rank()} is done\n", end="", flush=True)
dist.destroy_process_group()
