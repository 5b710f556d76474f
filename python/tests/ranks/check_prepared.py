"""Reductions that an optimizer keeps from step to step, and collects: whatever else the program does meanwhile."""

import gc
import itertools
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline.torch as hvd
from paceline.common import abi, handles


def make(what, *sizes, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])
    names = [(f"{what} {n}", p) for n, p in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), names, **options)
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


def test_gradients_that_the_engine_cannot_use_are_reduced_as_they_are(size):
    model, optimizer = make("odd", 6, 4, 4)
    optimizer.zero_grad()
    first = model[0].weight
    first.grad = torch.zeros(6, 4).t()  # backward adds to it and keeps its strides
    model(torch.ones(1, 6)).sum().backward()
    assert not first.grad.is_contiguous()
    want = first.grad.clone() * hvd.size()
    optimizer.step()
    assert torch.equal(first.grad * size, want)
    for p, q in zip(model.parameters(), [*model.parameters()], strict=True):
        assert (hvd.allgather(p.grad.contiguous()[None]) == q.grad).all()
    backward(model, optimizer, 1.0)  # and again as before
    optimizer.step()


def test_a_second_pass_is_refused_where_the_first_was_collected():
    model, optimizer = make("twice", 4, 4)
    backward(model, optimizer, 1.0)
    with pytest.raises(AssertionError, match="computed more than backward_passes_per_step times"):
        model(torch.ones(1, 4)).sum().backward()
    if hvd.size() > 1:
        with pytest.raises(RuntimeError, match=r"twice 0\.\w+"):
            optimizer.step()
    backward(model, optimizer, 2.0)
    optimizer.step()
    assert model[0].bias.grad.tolist() == [2.0] * 4


def test_a_group_may_be_added_between_backward_and_step(rank, size):
    model, optimizer = make("groups", 4, 4)
    more = nn.Parameter(torch.zeros(3))
    backward(model, optimizer, float(rank))
    optimizer.add_param_group({"params": [more]})
    with pytest.raises(AssertionError, match=r"before optimizer\.step\(\)"):
        optimizer.zero_grad()
    optimizer.step()
    for _ in range(3):
        assert model[0].bias.grad.tolist() == [(size - 1) / 2] * 4
        backward(model, optimizer, float(rank))
        (more * (rank + 1)).sum().backward()
        optimizer.step()
        assert more.grad.tolist() == [(size + 1) / 2] * 3


def fail(model, optimizer):
    """A backward that fails when it has made the gradients of the last layer."""
    stop = model[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model, optimizer, 1.0)
    stop.remove()


def test_a_failed_backward_leaves_the_rest_to_the_step(rank, size):
    """What it has made is reduced, what it has not is zeros, and the next backward is as ever."""
    model, optimizer = make("fails", 4, 4, 4)
    fail(model, optimizer)
    optimizer.step()
    assert model[1].bias.grad.tolist() == [1.0] * 4
    assert model[0].weight.grad.abs().sum() == 0
    for _ in range(2):
        backward(model, optimizer, float(rank))
        optimizer.step()
        assert model[1].bias.grad.tolist() == [(size - 1) / 2] * 4


def test_who_waits_in_another_thread_has_collected_gradients_reduced(rank, size):
    """Ranks wait for each other's gradients while backward is held up on each of them."""
    model, optimizer = make("held up", *[4] * 6)
    optimizer.zero_grad()

    def hold_up(gradient):
        waiter = threading.Thread(target=hvd.allreduce, args=(torch.ones(1),), kwargs={"name": "held up metric"})
        waiter.start()
        waiter.join()

    stop = model[1].weight.register_hook(hold_up)
    (model(torch.ones(1, 4)) * float(rank)).sum().backward()
    stop.remove()
    mine = model[-1].bias.grad
    optimizer.step()
    assert torch.equal(mine, torch.full((4,), (size - 1) / 2))


def test_an_optimizer_may_go_after_a_failed_backward(size):
    """Neither its hooks nor what they have collected stay."""
    model, optimizer = make("forgotten", 4, 4, 4)
    fail(model, optimizer)
    seen = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert seen() is None
    names = [(f"remembered {n}", p) for n, p in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), names)
    for _ in range(3):
        backward(model, optimizer, 1.0)
        optimizer.step()
        assert model[1].bias.grad.tolist() == [1.0] * 4
    if size > 1:
        assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())
    seen = [weakref.ref(p) for p in model.parameters()]
    fail(model, optimizer)
    del model, optimizer, names
    gc.collect()
    assert [p() for p in seen] == [None] * 4


def test_a_graph_may_be_used_twice(rank, size):
    model, optimizer = make("retained", 4, 4, 4, backward_passes_per_step=2)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 4)) * float(rank)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        assert model[1].bias.grad.tolist() == [size - 1.0] * 4


def test_a_backward_within_backward(rank, size):
    model, optimizer = make("nested", *[4] * 4)
    x = torch.ones(1, 4, requires_grad=True)
    for _ in range(3):
        backward(model, optimizer, float(rank))
        optimizer.step()
        want = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        (model[2](checkpoint(model[1], model[0](x), use_reentrant=True)) * float(rank)).sum().backward()
        optimizer.step()
        for p, w in zip(model.parameters(), want, strict=True):
            torch.testing.assert_close(p.grad, w)  # sums in another order
            assert (hvd.allgather(p.grad[None]) == p.grad).all()


def test_two_optimizers_share_a_backward(rank, size):
    one, first = make("first", 4, 4, 4)
    two, second = make("second", 4, 4)
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        (two(one(torch.ones(1, 4))) * float(rank)).sum().backward()
        second.step()
        first.step()
        assert two[0].bias.grad.tolist() == [(size - 1) / 2] * 4
        assert (hvd.allgather(one[0].weight.grad[None]) == one[0].weight.grad).all()


def test_what_has_not_fitted_is_reduced_while_backward_runs(size):
    """Only the first time does it wait until backward has ended, as what is prepared seemed to fit."""
    model, optimizer = make("early", 6, 4)
    started, p = [], model[0].weight
    p.register_post_accumulate_grad_hook(lambda p: started.append(p in optimizer._in_flight))
    for _ in range(3):
        optimizer.zero_grad()
        p.grad = torch.zeros(6, 4).t()
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step()
    assert size == 1 or started == [False, True, True]
    started.clear()
    for _ in range(3):
        backward(model, optimizer, 1.0)
        optimizer.step()
        assert p.grad.tolist() == [[1.0] * 6] * 4
    assert size == 1 or started == [True, False, False]
