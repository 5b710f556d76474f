"""DistributedOptimizer as an optimizer of PyTorch: its calls, states and hooks, and what it refuses."""

import contextlib
import copy
import gc
import io
import pickle
import warnings

import pytest
import torch
from nets import batch, loss_of, net, sgd, train_both

import paceline
import paceline.torch as hvd


def test_synchronizing_twice_is_warned_about():
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    loss_of(model, batch(hvd.rank())).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def test_closures_have_their_gradients_reduced():
    model, alone = net(), net()
    optimizer, lonely = hvd.DistributedOptimizer(sgd(model)), sgd(alone)
    for step in range(3):

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch(hvd.rank(), step))
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        lonely.zero_grad()
        sum(loss_of(alone, batch(r, step)) for r in range(hvd.size())).div(hvd.size()).backward()
        lonely.step()
    torch.testing.assert_close(model[2].weight, alone[2].weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=["average", "adasum"])
def test_schedulers_and_step_hooks_work(op):
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=op)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(hvd.rank())).backward()
            optimizer.step()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125 and len(called) == 3


def test_a_scheduler_made_before_wrapping_still_rules_the_rate():
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner)
    loss_of(model, batch(hvd.rank())).backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_state_dict_passes_through_and_loads():
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    loss_of(model, batch(hvd.rank())).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    assert set(saved) == {"state", "param_groups"}
    other = hvd.DistributedOptimizer(sgd(model))
    other.load_state_dict(saved)
    other.load_state_dict(saved)
    calls = []
    other.register_step_pre_hook(lambda *_: calls.append(1))
    assert torch.equal(
        other.state[model[0].weight]["momentum_buffer"], optimizer.state[model[0].weight]["momentum_buffer"]
    )
    del optimizer
    gc.collect()
    other.zero_grad()
    loss_of(model, batch(hvd.rank())).backward()
    other.step()
    assert len(calls) == 1


def test_it_is_an_optimizer_of_the_wrapped_class_with_its_state_and_options():
    model = net()
    inner = sgd(model)
    loss_of(model, batch(0)).backward()
    inner.step()
    optimizer = hvd.DistributedOptimizer(inner)
    assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
    assert optimizer.param_groups is inner.param_groups and optimizer.defaults["momentum"] == 0.9
    assert optimizer.state[model[0].weight]["momentum_buffer"] is inner.state[model[0].weight]["momentum_buffer"]


def test_optimizers_with_constructors_of_their_own_can_be_wrapped():
    class Odd(torch.optim.SGD):
        def __init__(self, needed, params):
            super().__init__(params, lr=needed)

    model = net()
    assert hvd.DistributedOptimizer(Odd(0.25, model.parameters())).param_groups[0]["lr"] == 0.25


def test_a_dropped_optimizer_no_longer_reduces():
    model = net()
    hvd.DistributedOptimizer(sgd(model))
    gc.collect()
    train_both(sgd, wrap=lambda o, _: hvd.DistributedOptimizer(o))
    loss_of(model, batch(hvd.rank())).backward()
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_zero_grad_too_early_is_refused():
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    loss_of(model, batch(hvd.rank())).backward()
    with pytest.raises(AssertionError, match=r"before optimizer\.step\(\)"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert model[0].weight.grad.abs().sum() == 0


def test_more_backward_passes_than_announced_are_refused():
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    loss_of(model, batch(hvd.rank())).backward()
    with pytest.raises(AssertionError, match="Gradients were computed more than backward_passes_per_step times before"):
        loss_of(model, batch(hvd.rank())).backward()
    with pytest.raises(RuntimeError, match=r"noname\.0\.3") if hvd.size() > 1 else contextlib.nullcontext():
        optimizer.step()  # the second pass has added to the first gradient that was in flight


def test_passes_can_be_changed():
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        loss_of(model, batch(hvd.rank())).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate": paceline.Significance(0.1)},
        {"groups": 2},
        {"gradients_in_arena": True},
        {"cross_barrier": True},
        {"op": hvd.Adasum},
        {"sync": "ssp:1"},
        {"sync": "ssp:1", "wait_free": True},
    ],
    ids=str,
)
def test_an_optimizer_is_not_copied_but_its_state_and_its_model_are(options):
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    named = [(f"copied {options} {n}", p) for n, p in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(inner, named, **options)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)

    def step(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, batch(hvd.rank())).backward()
        optimizer.step()

    step(model, optimizer)
    step(model, optimizer)
    file = io.BytesIO()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda o: torch.save(o, file), lambda o: copy.deepcopy([o])):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled: save its state_dict\(\), wrap"):
            copied(optimizer)
    optimizer.agree()
    state = copy.deepcopy(optimizer.state_dict())
    again = copy.deepcopy(model)
    pickle.loads(pickle.dumps([state, copy.deepcopy(scheduler.state_dict())]))
    other = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    named = [(f"again {options} {n}", p) for n, p in again.named_parameters()]
    wrapped = hvd.DistributedOptimizer(other, named, **options)
    wrapped.load_state_dict(state)
    step(again, wrapped)
    wrapped.agree()
    hvd.barrier()


def test_wrong_arguments_are_refused():
    model = net()
    named = list(model.named_parameters())
    with pytest.raises(ValueError, match=r"sequence of \(name, parameter\)"):
        hvd.DistributedOptimizer(sgd(model), named_parameters=model.parameters())
    with pytest.raises(ValueError, match=r"twice: 0\.weight$"):
        hvd.DistributedOptimizer(sgd(model), named_parameters=[*named, named[0]])
    with pytest.raises(ValueError, match=r"lacks 1 of the optimizer's 4 parameters: group 0, place 3, shape \(2,\)"):
        hvd.DistributedOptimizer(sgd(model), named_parameters=named[:-1])
    with pytest.raises(ValueError, match=r"works with op=hvd\.Average only"):
        hvd.DistributedOptimizer(sgd(model), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="a number above 0"):
        hvd.DistributedOptimizer(sgd(model), gradient_predivide_factor=0)
    with pytest.raises(ValueError, match="backward_passes_per_step=0: at least 1"):
        hvd.DistributedOptimizer(sgd(model), backward_passes_per_step=0)
    with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd(model)))
    with pytest.raises(ValueError, match="groups must be a positive number"):
        hvd.DistributedOptimizer(sgd(model), groups=-1)
    with pytest.raises(ValueError, match="groups must consist of tensors"):
        hvd.DistributedOptimizer(sgd(model), groups=[["weight"]])
    with pytest.raises(ValueError, match="only once in groups"):
        hvd.DistributedOptimizer(sgd(model), groups=[[model[0].weight], [model[0].weight]])
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.DistributedOptimizer(sgd(model), op=hvd.Adasum, process_set=hvd.ProcessSet([0]))
