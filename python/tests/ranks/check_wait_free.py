"""DistributedOptimizer(wait_free=True): the same training as without it, sent while backward runs."""

import copy

import pytest
import torch
from nets import RELEASE
from torch import nn

import paceline
import paceline.torch as hvd

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "sgd, foreach": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=True),
    "sgd, fused": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, foreach=False),
    "adam, foreach": lambda groups: torch.optim.Adam(groups, lr=0.01, foreach=True, amsgrad=True),
    "adamw, fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.001, centered=True),
}
if RELEASE < (2, 4):  # whose fused optimizers are for CUDA alone
    OPTIMIZERS = {kind: make for kind, make in OPTIMIZERS.items() if "fused" not in kind}


class Net(nn.Module):
    """Layers of every kind: used twice, frozen, unused, used in some steps, and needed late in backward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.twice = nn.Linear(32, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.seldom = nn.Parameter(torch.ones(32))
        self.unused = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(32, 32)

    def forward(self, x, step):
        x = self.first(x) * self.last.weight.detach()[0]  # saved for the backward of first, after last has its gradient
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        if step % 3 != 1:
            x = x * self.seldom
        return self.last(self.frozen(x))


def loss_of(model, step, by=0):
    generator = torch.Generator().manual_seed(1000 * by + step)
    x = torch.randn(8, 6, generator=generator).to(model.unused.dtype)
    return model(x, step).square().mean()


def groups_of(model):
    bias = [p for n, p in model.named_parameters() if n.endswith("bias")]
    return [
        {"params": [p for n, p in model.named_parameters() if not n.endswith("bias")]},
        {"params": bias, "lr": 0.02},
    ]


def optimizer_of(model, make, name, wait_free, sync="ssp:0", **options):
    named = [(f"{name} {n}", p) for n, p in model.named_parameters()]
    return hvd.DistributedOptimizer(make(groups_of(model)), named, sync=sync, wait_free=wait_free, **options)


def train(model, optimizer, steps, by=0, passes=1):
    """Returns the parameters after each step. by: whose data; the same on all ranks gives sums in any order."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    after = []
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            loss_of(model, passes * step + i, by).backward()
        optimizer.step()
        schedule.step()
        after.append([p.detach().clone() for p in model.parameters()])
    return after


def both(make, name, steps=6, by=0, passes=1, dtype=torch.float32, **options):
    """The parameters after each step, without and with wait_free."""
    results = []
    for wait_free in (False, True):
        torch.manual_seed(7)
        model = Net().to(dtype)
        optimizer = optimizer_of(
            model, make, f"{name} {wait_free}", wait_free, backward_passes_per_step=passes, **options
        )
        results.append(train(model, optimizer, steps, by, passes))
        hvd.barrier()
    return results


def assert_same(plain, early):
    for step, (ours, theirs) in enumerate(zip(plain, early, strict=True)):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b), (step, i, (a - b).abs().max())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_parameters_are_the_same_bit_for_bit(kind):
    plain, early = both(OPTIMIZERS[kind], kind)
    assert_same(plain, early)
    assert not torch.equal(plain[-1][0], plain[0][0])


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_ranks_with_other_gradients_end_alike(op):
    plain, early = both(OPTIMIZERS["sgd"], f"apart {op}", by=hvd.rank(), dtype=torch.float64, op=op)
    for ours, theirs in zip(plain, early, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    for p in early[-1]:
        torch.testing.assert_close(hvd.broadcast(p, 0), p, rtol=0, atol=0)


def test_gradients_add_up_over_backward_passes():
    assert_same(*both(OPTIMIZERS["adam"], "passes", passes=3))


def test_what_does_not_matter_is_held_back_as_without_it():
    plain, early = both(OPTIMIZERS["sgd"], "gated", gate=paceline.Significance(0.05))
    assert_same(plain, early)
    everything, _ = both(OPTIMIZERS["sgd"], "not gated")
    assert not torch.equal(plain[-1][0], everything[-1][0])
    for wait_free in (False, True):
        weight = nn.Parameter(torch.ones(4))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            [(f"halved {wait_free}", weight)],
            sync="asp",
            gate=paceline.Significance(1.0),
            wait_free=wait_free,
        )
        for gradient in (0.0, 0.6):
            optimizer.zero_grad()
            (weight.sum() * gradient).backward()
            optimizer.step()
        optimizer.agree()  # a change by 0.6 is held back beside the 1.0 before it, and sent beside the 0.4 after it
        torch.testing.assert_close(weight.detach(), torch.full((4,), 0.4))


def test_what_has_hardly_changed_is_not_read_as_without_it():
    before = paceline.tally()["withheld"]
    plain, early = both(OPTIMIZERS["sgd"], "pulled", steps=12, pull_gate=paceline.Significance(0.3))
    assert_same(plain, early)
    withheld = torch.tensor(float(paceline.tally()["withheld"] - before))
    assert hvd.size() == 1 or hvd.allreduce(withheld, op=hvd.Sum) > 0
    everything, _ = both(OPTIMIZERS["sgd"], "all pulled", steps=12)
    assert hvd.size() == 1 or not torch.equal(plain[-1][0], everything[-1][0])


@pytest.mark.parametrize("codec", ["fp16", "topk:0.1"])
def test_codecs_code_the_same_differences(codec):
    results = []
    for wait_free in (False, True):
        weights = [nn.Parameter(torch.zeros(64, 64)) for _ in range(3)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(weights, lr=2**-4, momentum=0.5),
            [(f"coded {codec} {i}", w) for i, w in enumerate(weights)],
            op=hvd.Sum,
            compression=codec,
            sync="ssp:0",
            wait_free=wait_free,
        )
        numbers = torch.Generator().manual_seed(hvd.rank())
        for _ in range(6):
            optimizer.zero_grad()  # few bits, so that sums are exact, in whatever order
            sum((w * torch.randint(-8, 9, (64, 64), generator=numbers)).sum() for w in weights).backward()
            optimizer.step()
        results.append([w.detach() for w in weights])
        hvd.join()  # so that both have the same names, which servers follow
    assert_same([results[0]], [results[1]])


def test_a_rank_goes_on_with_its_own_steps_while_it_has_cached_parameters():
    results = []
    for wait_free in (False, True):
        torch.manual_seed(7)
        model = Net().double()
        optimizer = optimizer_of(
            model, OPTIMIZERS["sgd"], f"cached {wait_free}", wait_free, sync=paceline.SSP(4, cached=True)
        )
        after = train(model, optimizer, 4, by=hvd.rank())  # the fifth would read
        optimizer.agree()
        results.append((after, [p.detach().clone() for p in model.parameters()]))
        train(model, optimizer, 10, by=hvd.rank())
        hvd.barrier()
    assert_same(results[0][0], results[1][0])
    for plain, early in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(plain, early, rtol=1e-9, atol=1e-12)


def test_differences_are_sent_before_step_and_parameters_change_in_it():
    weight = nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("early", weight)], sync="asp", op=hvd.Sum, wait_free=True
    )

    def iterate(gradient):
        optimizer.zero_grad()
        (weight * gradient).sum().backward()
        optimizer.step()

    iterate(0.0)  # declares
    hvd.barrier()
    if hvd.rank() == 0:
        weight.sum().backward()
        assert (weight == 0).all()
        hvd.barrier()  # the others have its change by then
        optimizer.step()
    else:
        while (weight == 0).all():
            iterate(0.0)
        hvd.barrier()
    assert (weight == -1).all()


def test_closures_and_step_hooks_are_called_once_for_a_step():
    results = []
    for wait_free in (False, True):
        torch.manual_seed(7)
        model, calls = Net(), []
        optimizer = optimizer_of(model, OPTIMIZERS["adam"], f"closure {wait_free}", wait_free)
        optimizer.register_step_pre_hook(lambda o, *_, calls=calls: calls.append(len(o.param_groups[0]["params"])))
        optimizer.register_step_post_hook(lambda o, *_, calls=calls: calls.append(len(o.param_groups[1]["params"])))
        for step in range(4):

            def closure(model=model, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0
        assert calls == 4 * [6, 4]
        results.append([p.detach() for p in model.parameters()])
        hvd.barrier()
    assert_same([results[0]], [results[1]])


def test_state_is_saved_and_loaded_and_parameters_come_and_freeze():
    results = []
    for wait_free in (False, True):
        torch.manual_seed(7)
        model, name = Net(), f"changing {wait_free}"
        optimizer = optimizer_of(model, OPTIMIZERS["sgd"], name, wait_free)
        train(model, optimizer, 3)
        saved, start = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
        train(model, optimizer, 2)
        optimizer.load_state_dict(saved)
        model.last.bias.requires_grad_(False)  # keeps its momentum and loses its gradient
        train(model, optimizer, 2)
        model.last.bias.requires_grad_(True)
        extra = nn.Parameter(torch.ones(5))
        optimizer.add_param_group({"params": [extra], "lr": 0.5})
        for step in range(3):
            optimizer.zero_grad()
            (loss_of(model, step) + extra.square().sum()).backward()
            optimizer.step()
        loss_of(start, 0).backward()  # no optimizer has the copy
        results.append([p.detach() for p in (*model.parameters(), *start.parameters(), extra)])
        assert not torch.equal(extra.detach(), torch.ones(5)) and bool(extra._post_accumulate_grad_hooks) is wait_free
        hvd.barrier()
    assert_same([results[0]], [results[1]])


def test_backward_without_step_is_an_error_that_says_so():
    model = Net()
    optimizer = optimizer_of(model, OPTIMIZERS["sgd"], "no step", True)
    train(model, optimizer, 1)
    loss_of(model, 1).backward()
    with pytest.raises(AssertionError, match=r"before optimizer\.step\(\)"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="Increase backward_passes_per_step"):
        loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match="were changed"):  # by the second pass
        optimizer.step()
    optimizer.set_backward_passes_per_step(2)
    train(model, optimizer, 2, passes=2)
    hvd.barrier()


@pytest.mark.parametrize("how", ["join", "init"])
def test_nothing_is_sent_to_servers_that_have_forgotten_the_values(how):
    torch.manual_seed(hvd.rank())
    model = Net()
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = optimizer_of(model, OPTIMIZERS["sgd"], f"after {how}", True)
    train(model, optimizer, 2)
    hvd.barrier()
    if how == "join":
        hvd.join()
    else:
        loss_of(model, 2).backward()
        hvd.shutdown()
        for why in (r"shutdown\(\)", "init"):  # what was in flight, and what could not start
            with pytest.raises(hvd.HorovodInternalError, match=why):
                optimizer.step()
            loss_of(model, 2).backward()
        hvd.init(process_sets="dynamic")
    train(model, optimizer, 3)
    optimizer.agree()
    for p in model.parameters():
        torch.testing.assert_close(hvd.broadcast(p.detach(), 0), p.detach(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("sync", "text"),
    [
        (paceline.Adaptive(2, 3), "superstep ends"),
        (paceline.ElasticBSP(3), "superstep ends"),
        (paceline.DynamicPSSP(2), "significant all gradients are"),
        (paceline.Expression("lead < 3 || significance < 0.01"), "significant all gradients are"),
        ("elastic:4", "superstep ends"),
    ],
    ids=str,
)
def test_models_that_need_all_gradients_are_refused(sync, text):
    parameter = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=text):
        hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1), sync=sync, wait_free=True)


def test_optimizers_that_need_all_parameters_are_refused():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
            return super().step(closure)

    weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.DistributedOptimizer(torch.optim.LBFGS([weight]), sync="asp", wait_free=True)
    with pytest.raises(ValueError, match="op=Average or Sum"):
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1), op=hvd.Adasum, sync="asp", wait_free=True)
    optimizer = hvd.DistributedOptimizer(Counting([weight], lr=1), sync="asp", wait_free=True)
    weight.sum().backward()
    with pytest.raises(ValueError, match="changes steps of all parameters together"):
        optimizer.step()
    hvd.barrier()


def test_under_bsp_it_is_how_gradients_travel_anyway():
    assert_same(*both(OPTIMIZERS["adam"], "bsp", sync=paceline.BSP()))


def test_a_state_is_restored_while_changes_are_in_flight():
    """As an elastic training does whose loss is noticed after backward; its changes end with the round."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("restored in flight", weight)], sync="ssp:0", wait_free=True
    )
    for _ in range(2):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    state = hvd.elastic.TorchState(optimizer=optimizer)
    optimizer.zero_grad()
    weight.sum().backward()
    state.restore()
    assert weight.grad is None
    with pytest.raises(RuntimeError, match="changed after backward"):  # here, where the round goes on
        optimizer.step()
