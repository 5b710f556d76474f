"""DistributedDataParallel with topk gradients on two ranks: checkpoint.py FOLDER whole|resumed|without.

"whole" trains 6 steps and saves a checkpoint in the middle, from which the others go on, "without" lacks what the codec
holds back. Prints a hash of the parameters' bits.
"""

import hashlib
import sys
from pathlib import Path

import by_name  # noqa: F401
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.torch.distributed import DDPState, ddp_hook

STEPS = 6


def main():
    way = sys.argv[2]
    dist.init_process_group("paceline")
    file = Path(sys.argv[1], f"{dist.get_rank()}.pt")
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    model = DistributedDataParallel(network)
    model.register_comm_hook(DDPState("topk:0.05", network.named_parameters()), ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if way != "whole":
        saved = torch.load(file, weights_only=False)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if way == "resumed":
            paceline.load_compression_state(saved["codec"])
    for step in range(0 if way == "whole" else STEPS // 2, STEPS):
        if way == "whole" and step == STEPS // 2:
            states = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states | {"codec": paceline.compression_state()}, file)
        torch.manual_seed(100 * dist.get_rank() + step)
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    whole = torch.cat([p.detach().flatten() for p in network.parameters()])
    print(f"{hashlib.sha256(whole.numpy().tobytes()).hexdigest()}\n", end="", flush=True)  # ranks share the output
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
