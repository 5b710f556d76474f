"""Trains in several ways on two ranks, and prints the results' bits: training.py BACKEND FOLDER DEVICE."""

import os
import sys

import by_name  # noqa: F401
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

BACKEND, FOLDER, DEVICE = sys.argv[1:]
STEPS = 5


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(model, optimizer, same_data=False):
    for step in range(STEPS):
        torch.manual_seed(step if same_data else 100 * dist.get_rank() + step)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).sum().backward()
        optimizer.step()


def full(p):
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def bits(model):
    return [full(p).detach().flatten().view(torch.int32).tolist() for p in model.parameters()]


def ddp():
    model = DistributedDataParallel(network())
    train(model, torch.optim.SGD(model.parameters(), 0.01))
    return bits(model)


def zero():
    model = DistributedDataParallel(network())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))
    return bits(model)


def fsdp2():
    model, mesh = network(), init_device_mesh(DEVICE, (2,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.SGD(model.parameters(), 0.01))
    return bits(model)


def tensor_parallel():
    mesh = init_device_mesh(DEVICE, (2,))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, torch.optim.SGD(model.parameters(), 0.01), same_data=True)
    return bits(model)


def checkpoints():
    model, mesh = network(), init_device_mesh(DEVICE, (2,))
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.SGD(model.parameters(), 0.01))
    before = bits(model)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=FOLDER)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = {"model": model.state_dict()}
    checkpoint.load(state, checkpoint_id=FOLDER)
    model.load_state_dict(state["model"])
    assert bits(model) == before
    return before


def main():
    torch.set_default_device(DEVICE)
    dist.init_process_group(BACKEND)
    for way in (ddp, zero, fsdp2, tensor_parallel, checkpoints):
        print(f"rank {dist.get_rank()} {way.__name__} {way()}\n", end="", flush=True)
    dist.destroy_process_group()
    if BACKEND == "gloo":  # has been seen to abort the process while the interpreter ends
        os._exit(0)


if __name__ == "__main__":
    main()
