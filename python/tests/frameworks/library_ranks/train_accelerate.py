"""Trains with Accelerate, and prints the parameters' bits."""

import torch
from accelerate import Accelerator
from nets import bits, data, network, say

accelerator = Accelerator(cpu=True)
model = network()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(data(), batch_size=16)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
say(accelerator.process_index, losses[-1], bits(model))
accelerator.end_training()
