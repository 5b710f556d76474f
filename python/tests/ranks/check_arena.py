"""Tensors and gradients in the arena, which servers of this host use in place: the same results as elsewhere."""

import gc
import itertools

import pytest
import torch
from torch import nn

import paceline.torch as hvd
from paceline.common.engine import engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int32])
@pytest.mark.parametrize("elements", [1, 1000, 3_000_000])
def test_a_sum_in_the_arena(rank, size, dtype, elements):
    tensor = hvd.zeros_in_arena(elements, dtype=dtype)
    assert not tensor.any()
    for step in range(3):
        tensor.fill_(rank + step)
        hvd.allreduce_(tensor, op=hvd.Sum, name=f"arena {dtype} {elements}")
        assert torch.equal(tensor, torch.full_like(tensor, size * (size - 1) // 2 + size * step))


def test_some_ranks_have_it_in_the_arena(rank, size):
    tensor = hvd.zeros_in_arena(100_000) if rank % 2 else torch.zeros(100_000)
    for step in range(3):
        tensor.fill_(rank + step)
        hvd.allreduce_(tensor, op=hvd.Average, name="some in the arena")
        assert torch.equal(tensor, torch.full_like(tensor, (size - 1) / 2 + step))


def test_the_arena_has_room_again_when_a_tensor_is_gone():
    first = hvd.zeros_in_arena(1 << 20)
    at, part = first.data_ptr(), first[5:]
    del first
    assert hvd.zeros_in_arena(1 << 20).data_ptr() != at
    part.fill_(1)
    del part
    gc.collect()
    again = hvd.zeros_in_arena(1 << 20)
    assert again.data_ptr() == at
    assert not again.any()


def train(rank, in_arena, set_to_none=True, **options):
    """The losses of some steps, the parameters, and the optimizer, with the last step's gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise((7, 33, 200, 3))])
    every = nn.ModuleList([model, nn.Linear(2, 2)])  # the second is not used
    what = f"{in_arena} {set_to_none} {sorted(options)}"
    named = [(f"arena {what} {n}", p) for n, p in every.named_parameters()]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(every.parameters(), lr=0.1, momentum=0.9), named, gradients_in_arena=in_arena, **options
    )
    losses = []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        for _ in range(options.get("backward_passes_per_step", 1)):
            loss = model(torch.randn(5, 7, generator=generator)).square().mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        gradients = [p.grad for p in model.parameters()]
        if not options.get("cross_barrier"):
            optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.agree()
    return losses, [p.detach().clone() for p in model.parameters()], gradients, optimizer


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"backward_passes_per_step": 2}, {"cross_barrier": True}, {"groups": 2}, {"compression": "bf16"}]
)
def test_training_is_the_same_with_gradients_in_the_arena(rank, set_to_none, options):
    losses, parameters, _, _ = train(rank, False, set_to_none, **options)
    again, moved, gradients, optimizer = train(rank, True, set_to_none, **options)
    torch.testing.assert_close(again, losses)
    torch.testing.assert_close(moved, parameters)
    places = optimizer._places
    if "compression" in options:
        assert not places
    elif not options.get("cross_barrier"):
        assert len(places) == 8
        assert all(any(g is place for place in places.values()) for g in gradients[:6])


def test_gradients_that_a_program_replaces_are_reduced(rank, size):
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    named = [("arena replaced", model.weight)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), named, gradients_in_arena=True)
    for _ in range(2):
        (model(torch.ones(3)) * rank).sum().backward()
        optimizer.synchronize()
        model.weight.grad = model.weight.grad * 2  # as a program may that clips
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.weight.detach(), torch.full((1, 3), -2.0 * (size - 1)))


def test_there_is_no_arena_for_more_than_it_has():
    assert engine.arena(1 << 40) is None
    assert engine.arena(0) is None


def test_graphs_of_gradients_do_not_grow():
    """With backward(create_graph=True) a gradient in the arena is part of this step's graph alone."""
    layer = nn.Linear(300, 300, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.01), [("graph", layer.weight)], gradients_in_arena=True
    )
    sizes = []
    for _ in range(4):
        optimizer.zero_grad()
        layer(torch.ones(1, 300)).square().sum().backward(create_graph=True)
        optimizer.synchronize()
        seen, left = set(), [layer.weight.grad.grad_fn]
        while left:
            if (node := left.pop()) is not None and node not in seen:
                seen.add(node)
                left += [before for before, _ in node.next_functions]
        sizes.append(len(seen))
        with optimizer.skip_synchronize():
            optimizer.step()
    assert max(sizes[1:]) == sizes[1], sizes
