"""Uneven data: each worker trains on its own number of batches, and join lets the others continue without it.

paceline run -np 2 python pytorch_join.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline.torch as hvd


def main():
    hvd.init()
    torch.manual_seed(hvd.rank())

    # A straight line to learn; rank r has 10 (r + 1) batches of it.
    x = torch.rand(80 * (hvd.rank() + 1), 1)
    loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8, shuffle=True)

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        last = hvd.join()  # this worker contributes zeros until the last one has joined
        # The ranks that joined early missed the last steps: use the parameters of the last one.
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)

    if hvd.rank() == 0:
        print(f"weight {model.weight.item():.2f} (3), bias {model.bias.item():.2f} (1)")


if __name__ == "__main__":
    main()
