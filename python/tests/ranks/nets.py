"""A small network and its training, for the checks of DistributedOptimizer."""

import torch

import paceline.torch as hvd

RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])


def net():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()


def batch(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.rand(6, 4, dtype=torch.float64, generator=generator)


def loss_of(model, x):
    return model(x).square().mean()


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def train_both(
    make, steps=4, passes=1, wrap=None, reference=lambda grads: torch.stack(grads).mean(0), change=lambda *_: None
):
    """Trains with the optimizer under test on this rank's data, and alone on everybody's; compares after each step.

    change: called with each model before anything, as step -1, and before each step.
    """
    model, alone = net(), net()
    change(model, -1)
    change(alone, -1)
    optimizer = wrap(make(model), model)
    lonely = make(alone)
    for step in range(steps):
        change(model, step)
        change(alone, step)
        optimizer.zero_grad()
        for i in range(passes):
            loss_of(model, batch(hvd.rank(), 10 * step + i)).backward()
        optimizer.step()
        everyones = []
        for rank in range(hvd.size()):
            alone.zero_grad()
            for i in range(passes):
                loss_of(alone, batch(rank, 10 * step + i)).backward()
            everyones.append([None if p.grad is None else p.grad.clone() for p in alone.parameters()])
        for p, grads in zip(alone.parameters(), zip(*everyones, strict=True), strict=True):
            p.grad = None if p.grad is None else reference(list(grads))
        lonely.step()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
