"""Groups of some ranks where the default group is bound to a device, as scripts for NCCL have it; three ranks."""

import by_name  # noqa: F401
import torch
import torch.distributed as dist

dist.init_process_group("paceline", device_id=torch.device("cpu", 0))
rank, x = dist.get_rank(), torch.ones(2)
pair = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(x, group=pair)
    assert x.tolist() == [2, 2], x
dist.barrier()
print(f"rank {rank} is done\n", end="", flush=True)
dist.destroy_process_group()
