"""DistributedOptimizer: what it reduces, when, and what it refuses."""

import gc
import warnings

import pytest
import torch

import paceline.torch as hvd


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


def train_both(make, steps=4, passes=1, wrap=None, reference=lambda grads: torch.stack(grads).mean(0)):
    """Trains with the optimizer under test on this rank's data, and alone on everybody's; compares after each step."""
    model, alone = net(), net()
    optimizer = wrap(make(model), model)
    lonely = make(alone)
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            loss_of(model, batch(hvd.rank(), 10 * step + i)).backward()
        optimizer.step()
        everyones = []
        for rank in range(hvd.size()):
            alone.zero_grad()
            for i in range(passes):
                loss_of(alone, batch(rank, 10 * step + i)).backward()
            everyones.append([p.grad.clone() for p in alone.parameters()])
        for p, grads in zip(alone.parameters(), zip(*everyones, strict=True), strict=True):
            p.grad = reference(list(grads))
        lonely.step()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


WRAPPED = {
    "plain": {},
    "backward passes": {"backward_passes_per_step": 3},
    "predivide": {"gradient_predivide_factor": 2.5},
    "two groups": {"groups": 2},
    "more groups than parameters": {"groups": 50},
    "groups and passes": {"groups": 2, "backward_passes_per_step": 2},
    "groups and predivide": {"groups": 1, "gradient_predivide_factor": 4.0},
}


@pytest.mark.parametrize("options", WRAPPED.values(), ids=WRAPPED.keys())
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_equals_training_alone_on_everybodys_data(options, named):
    def wrap(optimizer, model):
        names = {"named_parameters": model.named_parameters()} if named else {}
        return hvd.DistributedOptimizer(optimizer, **names, **options)

    train_both(sgd, wrap=wrap, passes=options.get("backward_passes_per_step", 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
        lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.1),
        lambda m: torch.optim.RMSprop(m.parameters()),
        lambda m: torch.optim.SGD([{"params": m[0].parameters()}, {"params": m[2].parameters(), "lr": 0.3}], lr=0.1),
    ],
    ids=["Adam", "AdamW", "RMSprop", "groups of parameters"],
)
def test_wraps_any_optimizer(make):
    train_both(make, wrap=lambda optimizer, _: hvd.DistributedOptimizer(optimizer))


def test_op_sum(size):
    train_both(
        sgd, wrap=lambda o, _: hvd.DistributedOptimizer(o, op=hvd.Sum), reference=lambda g: torch.stack(g).sum(0)
    )


def test_groups_given_as_lists():
    def wrap(optimizer, model):
        params = list(model.parameters())
        return hvd.DistributedOptimizer(optimizer, groups=[params[::2], params[1:2]])

    train_both(sgd, wrap=wrap)


def test_num_groups_still_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match="use groups"):
        train_both(sgd, wrap=lambda o, _: hvd.DistributedOptimizer(o, num_groups=2))


def test_fp16_compression_is_close():
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model), compression=hvd.Compression.fp16)
    loss_of(model, batch(hvd.rank())).backward()
    optimizer.synchronize()
    grad = model[0].weight.grad
    assert grad.dtype == torch.float64
    alone = net()
    sum(loss_of(alone, batch(r)) for r in range(hvd.size())).div(hvd.size()).backward()
    torch.testing.assert_close(grad, alone[0].weight.grad, rtol=5e-3, atol=1e-4)
    with optimizer.skip_synchronize():
        optimizer.step()


def test_channels_last_models(rank, size):
    model = torch.nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    x = torch.full((2, 3, 5, 5), rank + 1.0, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    model(x).sum().backward()
    optimizer.synchronize()
    expected = torch.full_like(model.weight, 2 * 9 * (size + 1) / 2)
    torch.testing.assert_close(model.weight.grad, expected)
    with optimizer.skip_synchronize():
        optimizer.step()


def test_gradients_can_be_clipped_between_synchronize_and_step():
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, batch(hvd.rank())).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with optimizer.skip_synchronize():
        optimizer.step()
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    torch.testing.assert_close(moved.norm(), torch.tensor(1e-3, dtype=torch.float64), rtol=1e-2, atol=0)


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


def test_parameters_without_gradients_on_some_ranks(rank, size):
    model = torch.nn.ModuleDict({"both": torch.nn.Linear(2, 1), "odd": torch.nn.Linear(2, 1)}).double()
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.ones(1, 2, dtype=torch.float64)
        y = model["both"](x) + (model["odd"](x) if rank % 2 else 0)
        y.sum().backward()
        optimizer.synchronize()
        torch.testing.assert_close(model["odd"].weight.grad, torch.full((1, 2), 0.5, dtype=torch.float64))
        with optimizer.skip_synchronize():
            optimizer.step()


def test_frozen_parameters_are_left_alone():
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    loss_of(model, batch(hvd.rank())).backward()
    optimizer.step()
    assert model[0].weight.grad is None


def test_parameters_added_later_are_reduced_too(rank, size):
    model, later = net(), torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    optimizer.add_param_group({"params": [later]})
    (loss_of(model, batch(rank)) + (later * rank).sum()).backward()
    optimizer.synchronize()
    assert torch.equal(later.grad, torch.full((3,), (size - 1) / 2))
    with optimizer.skip_synchronize():
        optimizer.step()


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_sparse_gradients(as_dense, op, rank, size):
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    torch.nn.init.zeros_(embedding.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(embedding.parameters(), lr=1.0), sparse_as_dense=as_dense, op=getattr(hvd, op)
    )
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.init.zeros_(embedding.weight)
        embedding(torch.tensor([rank, 9, 9])).sum().backward()
        optimizer.step()
        expected = torch.zeros(10, 3)
        expected[:size] = -1.0
        expected[9] = -2.0 * size
        torch.testing.assert_close(embedding.weight.detach(), expected / (size if op == "Average" else 1))


def test_sparse_gradients_that_a_rank_lacks_once_they_are_known(rank, size):
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0))
    embedding(torch.tensor([rank])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.nn.init.zeros_(embedding.weight)
    if rank == 0:
        embedding(torch.tensor([5])).sum().backward()
    optimizer.step()
    torch.testing.assert_close(embedding.weight[5].detach(), torch.full((3,), -1.0 / size))


def test_gradients_within_a_process_set(rank, size):
    ours = hvd.add_process_set(range(1, size))
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=ours)
    loss_of(model, batch(rank)).backward()
    optimizer.synchronize()
    members = ours.ranks if ours.included() else [rank]
    alone = net()
    sum(loss_of(alone, batch(r)) for r in members).div(len(members)).backward()
    torch.testing.assert_close(model[0].weight.grad, alone[0].weight.grad)
    with optimizer.skip_synchronize():
        optimizer.step()
    hvd.barrier()
    hvd.remove_process_set(ours)


def test_adasum_steps_alike_when_all_gradients_are_alike():
    model, alone = net(), net()
    optimizer, lonely = hvd.DistributedOptimizer(sgd(model), op=hvd.Adasum), sgd(alone)
    for step in range(3):
        for m, o in ((model, optimizer), (alone, lonely)):
            o.zero_grad()
            loss_of(m, batch(0, step)).backward()
            o.step()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_adasum_adds_orthogonal_steps(rank, size):
    x = torch.nn.Parameter(torch.zeros(size, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=0.5), op=hvd.Adasum, backward_passes_per_step=2)
    for _ in range(2):
        x[rank].mul(1.0).backward()
    optimizer.step()
    torch.testing.assert_close(x.detach(), torch.full((size,), -1.0, dtype=torch.float64))
    with pytest.raises(AssertionError, match="skip_synchronize"), optimizer.skip_synchronize():
        pass
    optimizer.synchronize()


def test_adasum_with_closures_and_missing_gradients(rank):
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), op=hvd.Adasum)

    def closure():
        loss = loss_of(model, batch(rank))
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    optimizer.zero_grad()
    optimizer.step()


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
    with pytest.raises(AssertionError, match="increase backward_passes_per_step"):
        loss_of(model, batch(hvd.rank())).backward()
    optimizer.step()


def test_passes_can_be_changed():
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        loss_of(model, batch(hvd.rank())).backward()
    optimizer.step()


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
