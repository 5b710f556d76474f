"""Reductions that an optimizer keeps from step to step, and collects: whatever else the program does meanwhile."""

import gc
import itertools
import threading

import pytest
import torch
from torch import nn

import paceline.torch as hvd
from paceline.common import abi, handles


def make(what, *sizes):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])
    names = [(f"{what} {n}", p) for n, p in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), names)
    for _ in range(2):  # from the second step on the operations are those of the first
        backward(model, optimizer, 1.0)
        optimizer.step()
    return model, optimizer


def backward(model, optimizer, scale):
    optimizer.zero_grad()
    (model(torch.ones(1, model[0].in_features)) * scale).sum().backward()


def test_a_thread_may_reduce_while_another_trains(rank, size):
    model, optimizer = make("threads", *[2] * 40)
    seen = []

    def reduce():
        for _ in range(100):
            seen.append(hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, name="threads metric").item())

    thread = threading.Thread(target=reduce)
    thread.start()
    for _ in range(50):
        backward(model, optimizer, float(rank))
        mine = model[-1].bias.grad
        optimizer.step()
        assert torch.equal(mine, torch.full((2,), (size - 1) / 2))
    thread.join()
    assert seen == [size * (size - 1) / 2] * 100


def outside(handle):
    """Asks the engine itself, which calls no part of the package that submits what is collected."""
    return abi.library().pl_poll(handles._pending[handle].handles[0]) != abi.PENDING


@pytest.mark.parametrize("ended", [hvd.poll, outside])
def test_a_rank_that_never_waits_gives_the_others_what_they_wait_for(rank, ended):
    model, optimizer = make(ended.__name__, 4, 4)
    backward(model, optimizer, 1.0)
    if rank == 0:  # the other ranks need this one's gradients, of which it hears by no wait of the engine
        handle = hvd.allreduce_async(torch.ones(1), name=f"{ended.__name__} metric")
        while not ended(handle):
            pass
        hvd.synchronize(handle)
        optimizer.step()
    else:
        optimizer.step()
        hvd.allreduce(torch.ones(1), name=f"{ended.__name__} metric")


def test_what_load_state_dict_drops_is_over_on_every_rank():
    model, optimizer = make("loaded", 4, 4)
    backward(model, optimizer, 100.0)
    optimizer.load_state_dict(optimizer.state_dict())
    while True:  # as long as what was dropped is in flight its names cannot be used again
        backward(model, optimizer, 1.0)
        try:
            optimizer.synchronize()
            break
        except ValueError:
            continue
    assert model[0].bias.grad.tolist() == [1.0] * 4


def test_an_optimizer_that_goes_leaves_its_gradients_to_the_engine(rank):
    model, optimizer = make("gone", 64, 64)
    backward(model, optimizer, 7.0)
    if rank == 0:
        del model, optimizer
        gc.collect()
        tensors = [torch.full((64, 64), -5.0) for _ in range(64)]
        hvd.barrier()
        hvd.barrier()
        assert all(torch.equal(t, torch.full((64, 64), -5.0)) for t in tensors)
    else:
        hvd.barrier()
        optimizer.step()
        hvd.barrier()


def test_a_gradient_of_another_shape_is_reduced_as_it_is():
    model, optimizer = make("shapes", 8, 8)
    for p in model.parameters():
        p.data = p.data[:2].clone()
        p.grad = None
    (model(torch.ones(1, 8))).sum().backward()
    optimizer.step()
    assert model[0].weight.grad.tolist() == [[1.0] * 8] * 2
