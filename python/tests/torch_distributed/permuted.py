"""Ranks that torch.distributed counts in another order than the launcher, but for the first; three ranks."""

import os

import by_name  # noqa: F401
import torch
import torch.distributed as dist

rank = [0, 2, 1][int(os.environ["RANK"])]
where = "tcp://{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
dist.init_process_group("paceline", init_method=where, rank=rank, world_size=3)
ranks = [torch.zeros(1) for _ in range(3)]
dist.all_gather(ranks, torch.full((1,), float(rank)))
assert [each.item() for each in ranks] == [0, 1, 2], ranks
print(f"rank {rank} is done\n", end="", flush=True)
dist.destroy_process_group()
