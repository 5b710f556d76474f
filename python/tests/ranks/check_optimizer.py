"""DistributedOptimizer: which gradients it reduces, and to what."""

import os
import signal
import threading
import time

import pytest
import torch
from nets import batch, loss_of, net, sgd, train_both

import paceline.torch as hvd
from paceline.torch import _memory

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
    with pytest.warns(DeprecationWarning, match="replaced by `groups`"):
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


@pytest.mark.parametrize("known", [True, False], ids=["PyTorch tells", "it does not"])
@pytest.mark.parametrize(
    "options", [{}, {"groups": 1}, {"backward_passes_per_step": 2}, {"gradients_in_arena": True}], ids=str
)
def test_parameters_whose_gradients_are_one_tensor_are_each_reduced_once(options, known, monkeypatch, rank, size):
    """Backward hands one tensor on to both where they were added through views."""
    if not known:
        monkeypatch.setattr(_memory, "_use_count", None)
    named = [(f"of one tensor {i} {options} {known}", torch.nn.Parameter(torch.zeros(700, 400))) for i in range(4)]
    first, late, second, third = (p for _, p in named)
    passes = options.get("backward_passes_per_step", 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=1.0), named, **options)
    for _ in range(4):
        optimizer.zero_grad()
        early = first.t()  # whose backward comes after the others'
        x = late.square().sum() * 0
        for _ in range(passes):  # PyTorch alone adds to the one tensor twice in the second
            loss = ((early + second.t() + third.t()) * torch.full((700, 400), rank + 1.0).t()).sum() + x
            loss.backward(retain_graph=True)
        optimizer.step()
    for p in first, second, third:
        torch.testing.assert_close(p.detach(), torch.full((700, 400), -4 * passes * (size + 1) / 2))


def test_gradients_of_their_own_are_reduced_where_they_are(rank):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        grads = [p.grad for p in model.parameters()]
        addresses = [grad.data_ptr() for grad in grads]
        optimizer.step()
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
        assert [p.grad.data_ptr() for p in model.parameters()] == addresses


@pytest.mark.parametrize("kind", ["views", "detached", "data"])
@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"cross_barrier": True}], ids=str)
def test_gradients_may_be_parts_of_one_flat_tensor(options, kind, rank, size):
    named = [(f"of a flat gradient {i} {options} {kind}", torch.nn.Parameter(torch.zeros(3))) for i in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=1.0), named, **options)
    flat = torch.zeros(9)
    for i, (_, p) in enumerate(named):
        p.grad = torch.zeros(3)
        part = flat[3 * i : 3 * i + 3]
        p.grad = part if kind == "views" else part.detach() if kind == "detached" else p.grad
        if kind == "data":
            p.grad.data = part
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        sum((i + 1) * p.sum() * (rank + 1.0) for i, (_, p) in enumerate(named)).backward()
        optimizer.synchronize()
        assert flat.tolist() == [(i + 1) * (size + 1) / 2 for i in range(3) for _ in range(3)]
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.agree()


def test_frozen_parameters_are_left_alone():
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    loss_of(model, batch(hvd.rank())).backward()
    optimizer.step()
    assert model[0].weight.grad is None


@pytest.mark.parametrize(
    "options",
    [{}, {"groups": 2}, {"backward_passes_per_step": 2}, {"cross_barrier": True}, {"gradients_in_arena": True}],
    ids=["plain", "groups", "backward passes", "cross barrier", "in the arena"],
)
def test_parameters_may_be_frozen_and_unfrozen(options):
    """Horovod leaves each rank its own gradient of a parameter that was frozen when it was wrapped."""

    def change(model, step):
        model[0].requires_grad_(step >= 2)  # from the third step on
        model[2].bias.requires_grad_(step < 3 or step > 4)  # for two steps: its momentum and decay rest

    def wrap(optimizer, model):
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
        if options.get("cross_barrier"):
            wrapped.register_step_post_hook(lambda *_: None)  # so that `step` ends the step
        return wrapped

    train_both(
        lambda model: sgd(model, weight_decay=0.1),
        steps=7,
        wrap=wrap,
        passes=options.get("backward_passes_per_step", 1),
        change=change,
    )


def test_frozen_parameters_rest_with_cross_barrier_as_without(rank):
    """Also where the model clears the gradients, of which the optimizer does not hear."""

    def trained(**options):
        model = net()
        optimizer = sgd(model, weight_decay=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
        for step in range(5):
            model[2].bias.requires_grad_(step < 1)
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
        optimizer.agree()
        return [p.detach().clone() for p in model.parameters()]

    for with_it, without in zip(trained(cross_barrier=True), trained(), strict=True):
        torch.testing.assert_close(with_it, without, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"cross_barrier": True}, {"op": hvd.Adasum}], ids=["plain", "cross", "Adasum"])
def test_a_parameter_that_is_frozen_after_backward_still_counts_where_that_has_not_reached_it(options, rank):
    named = [(name, torch.nn.Parameter(torch.ones(3))) for name in ("used", "used by rank 0")]
    used, odd = (p for _, p in named)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, odd], lr=0.1), named, **options)
    for _ in range(2):
        odd.requires_grad_(True)
        optimizer.zero_grad()
        (used * rank + (odd if rank == 0 else 0)).sum().backward()
        odd.requires_grad_(False)
        optimizer.step()
    optimizer.agree()
    assert torch.equal(odd, hvd.broadcast(odd, 0)) and not torch.equal(odd, torch.ones(3))


def test_adasum_combines_what_was_unfrozen_or_added(rank):
    model = net()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(sgd(model[:2]), model.named_parameters(), op=hvd.Adasum)
    model.requires_grad_(True)
    optimizer.add_param_group({"params": model[2].parameters()})
    for step in range(3):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        for p, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, hvd.broadcast(p.detach(), 0)) and not torch.equal(p, old)


def test_adasum_drops_steps_in_flight_where_a_state_is_loaded(rank):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), op=hvd.Adasum)
    loss_of(model, batch(rank)).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    hvd.barrier()


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"op": hvd.Adasum}], ids=["plain", "groups", "Adasum"])
def test_backward_can_follow_a_state_that_was_loaded_while_gradients_were_on_their_way(options, rank, size):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
    for step in range(4):
        time.sleep(0.05 * (rank == size - 1))  # the others' gradients wait for it
        loss_of(model, batch(rank, step)).backward()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
    loss_of(model, batch(rank)).backward()
    optimizer.step()
    for p in model.parameters():
        assert torch.equal(p, hvd.broadcast(p.detach(), 0))


@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"op": hvd.Adasum}], ids=["plain", "groups", "Adasum"])
def test_a_state_can_be_loaded_where_ranks_have_made_different_gradients(options, rank):
    named = [(name, torch.nn.Parameter(torch.ones(3))) for name in ("of all", "of even ranks", "of odd ranks")]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=0.1), named, **options)
    for _ in range(3):
        (named[0][1] + named[1 + rank % 2][1]).sum().backward()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
    hvd.barrier()


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
    with pytest.raises(AssertionError, match="Skipping synchronization"), optimizer.skip_synchronize():
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


@pytest.mark.parametrize("steps", [0, 2])
def test_steps_follow_one_that_was_interrupted(steps, rank):
    """Ctrl-C in a notebook, while another rank is late."""
    model = net()
    named = [(f"interrupted {steps} {name}", p) for name, p in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), named)

    def step():
        optimizer.zero_grad()
        loss_of(model, batch(rank)).backward()
        optimizer.step()

    for _ in range(steps):
        step()
    if rank == 0:
        late = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        late.start()
        with pytest.raises(KeyboardInterrupt):
            step()
        late.join()
    hvd.barrier()
    if rank > 0:
        step()
    for _ in range(3):
        step()
    for delay in (0.01, 0.05, 0.1, 0.15):  # the step that was interrupted is ended by another call
        if rank == 0:
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            optimizer.zero_grad()
            loss_of(model, batch(rank)).backward()
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
                time.sleep(5)  # the signal may come when the step has ended
            timer.join()
        hvd.barrier()
        if rank > 0:
            step()
        else:
            optimizer.step()
    step()
    alone = [p.grad.clone() for p in model.parameters()]
    for mine, everyones in zip(alone, [hvd.allreduce(g) for g in alone], strict=True):
        torch.testing.assert_close(mine, everyones)


def test_adasum_refuses_an_optimizer_that_counts_its_steps_in_its_groups():
    class Counting(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    layer = torch.nn.Linear(2, 2)
    named = [(f"counting {name}", p) for name, p in layer.named_parameters()]
    optimizer = hvd.DistributedOptimizer(Counting(layer.parameters(), lr=0.1), named, op=hvd.Adasum)
    with pytest.raises(ValueError, match=r"step changes count of all parameters together.*use op=hvd\.Average"):
        layer(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad(set_to_none=True)
