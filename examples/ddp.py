"""Training with PyTorch's DistributedDataParallel: paceline run -np 2 --takeover gloo python examples/ddp.py.

Nothing here is Paceline's: with `torchrun --nproc-per-node 2` alone the same script runs on Gloo.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(50):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 8)).square().mean()
        loss.backward()
        optimizer.step()
    total = loss.detach()
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    if dist.get_rank() == 0:
        print(f"loss {total.item() / dist.get_world_size():.4f}, by {type(work).__module__.partition('.')[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
