"""DistributedOptimizer(cross_barrier=True): the same training as without it; steps end in the next forward."""

import copy
import gc
import pickle
import time
import weakref
from pathlib import Path

import pytest
import torch
from nets import RELEASE
from torch import nn

import paceline
import paceline.torch as hvd
from paceline.common.declaring import count_anew
from paceline.common.engine import engine
from paceline.torch import _cross_barrier

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "sgd, foreach": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=True),
    "sgd, fused": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "adam, tensor": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.01), foreach=False),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "adamw, fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True, amsgrad=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.001, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01, lr_decay=0.1),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
}
if RELEASE < (2, 4):  # whose fused optimizers are for CUDA alone
    OPTIMIZERS = {kind: make for kind, make in OPTIMIZERS.items() if "fused" not in kind}

IN_ORDER = {"sum_in_rank_order": True}


class Net(nn.Module):
    """Layers of every kind: used twice, shared, frozen, unused, used in some steps, and never called themselves."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.twice = nn.Linear(32, 32)
        self.shared = nn.Linear(32, 32)
        self.shared.weight = self.twice.weight
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)  # does not call its out_proj
        self.recurrent = nn.GRU(32, 32, batch_first=True)
        self.seldom = nn.Linear(32, 32)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(32))
        self.last = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x, step):
        x = torch.tanh(self.shared(torch.tanh(self.twice(torch.tanh(self.twice(self.first(x)))))))
        if step % 3 != 1:
            x = x + self.seldom(x)
        y = self.recurrent(self.attention(x[None], x[None], x[None])[0])[0][0]
        return self.last(self.frozen(x + y) * self.scale)


def loss_of(model, step):
    generator = torch.Generator().manual_seed(1000 * hvd.rank() + step)
    return model(torch.randn(8, 6, generator=generator), step).square().mean()


def groups_of(model):
    bias = [p for n, p in model.named_parameters() if n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    return [{"params": rest}, {"params": bias, "lr": 0.02}]


def optimizer_of(model, make, name, cross_barrier, **options):
    named = [(f"{name} {n}", p) for n, p in model.named_parameters()]
    return hvd.DistributedOptimizer(make(groups_of(model)), named, cross_barrier=cross_barrier, **options)


def train(model, optimizer, steps, passes=1, schedule=True):
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if schedule else None
    for step in range(steps):
        for i in range(passes):
            loss_of(model, passes * step + i).backward()
        optimizer.step()
        if schedule:
            schedule.step()
        optimizer.zero_grad()


def both(name, train_one, make=OPTIMIZERS["sgd"], model_of=Net, **options):
    """Trains without and with cross_barrier; the results must be the same bits on all ranks."""
    results = []
    for cross_barrier in (False, True):
        torch.manual_seed(7)
        model = model_of()
        optimizer = optimizer_of(model, make, name, cross_barrier, **options)
        extra = train_one(model, optimizer)
        results.append([p.detach().clone() for p in model.parameters()] + (extra or []))
        for p in model.parameters():
            assert torch.equal(hvd.broadcast(p.detach(), 0), p)
        hvd.join()
        count_anew()  # so that both have the same names, which codecs' random numbers follow
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert torch.equal(a, b), (i, (a - b).abs().max())
    return results[1]


@pytest.fixture(autouse=True, scope="module")
def sums_in_order(job):
    """Sums whose last bits do not depend on who came first."""
    hvd.barrier()
    hvd.shutdown()
    hvd.init(process_sets="dynamic", settings=IN_ORDER)
    yield
    hvd.shutdown()
    hvd.init(process_sets="dynamic")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_parameters_are_the_same_bit_for_bit(kind):
    both(kind, lambda model, optimizer: train(model, optimizer, 6), OPTIMIZERS[kind])


@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
        {"compression": "int8"},
        {"groups": 3},
        {"gate": paceline.Significance(0.05)},
    ],
    ids=str,
)
def test_every_way_to_reduce_gives_the_same(options):
    both(f"{options}", lambda model, optimizer: train(model, optimizer, 4), **options)


def test_gradients_add_up_over_backward_passes():
    both("passes", lambda model, optimizer: train(model, optimizer, 4, passes=3), backward_passes_per_step=3)


def test_a_step_ends_in_the_forward_of_its_module_and_not_before():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    optimizer = optimizer_of(model, OPTIMIZERS["sgd"], "in forward", True)
    first, last = model[0].weight, model[2].weight
    for _ in range(3):  # the first two compare the ranks' parameters
        before = [p.detach().clone() for p in (first, last)]
        model(torch.ones(2, 4)).sum().backward()
        assert first.grad is not None
        optimizer.step()
    assert torch.equal(first, before[0]) and torch.equal(last, before[1]) and first.grad is None
    x = model[0](torch.ones(2, 4))
    assert not torch.equal(first, before[0])
    # While the first layer waits the last may be stepped, but nothing says that its gradient is there by then.
    model[2](x)
    assert not torch.equal(last, before[1])
    assert not optimizer._steps


def test_clipping_after_synchronize_gives_the_same():
    def clipped(model, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step % 2:
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()

    both("clipped", clipped)


def test_gradients_that_change_in_flight_are_an_error():
    model = Net()
    optimizer = optimizer_of(model, OPTIMIZERS["sgd"], "changed", True)
    train(model, optimizer, 1)
    loss_of(model, 1).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="were changed after backward"):
        optimizer.step()
    loss_of(model, 1).backward()
    with pytest.raises(AssertionError, match=r"before optimizer\.step\(\)"):
        optimizer.zero_grad()
    optimizer.step()


with_grad_scaler = pytest.mark.skipif(RELEASE < (2, 3), reason="its GradScaler is for CUDA alone")


@with_grad_scaler
def test_gradients_that_are_unscaled_in_flight_are_an_error():
    model = Net()
    optimizer = optimizer_of(model, OPTIMIZERS["sgd"], "unscaled", True)
    loss_of(model, 1).backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="GradScaler is about to unscale"):
        scaler.unscale_(optimizer)
    optimizer.step()


@with_grad_scaler
def test_a_grad_scaler_gives_the_same():
    def scaled(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, step)
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()

    both("scaled", scaled, OPTIMIZERS["adam"])


def test_autocast_and_inference_mode_around_forward_do_not_touch_the_steps():
    class Multiplying(torch.optim.SGD):  # as Muon does, whose products autocast would round
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                    p -= group["lr"] * (state["sum"] @ state["sum"].T @ state["sum"])

    def mixed(model, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.ones(2, 4) * (step + hvd.rank())).square().mean()
            loss.backward()
            optimizer.step()
            if step == 2:
                with torch.inference_mode():
                    model(torch.ones(2, 4))

    both(
        "mixed",
        mixed,
        lambda groups: Multiplying(groups, lr=0.01),
        lambda: nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)]),
    )


def test_evaluation_state_copies_and_new_parameters_see_whole_steps():
    def watched(model, optimizer):
        seen = []
        for step in range(12):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            match step:
                case 3:
                    seen += [v.clone() for v in model.state_dict().values()]
                case 4:
                    state = optimizer.state_dict()["state"]
                    seen += [v.clone() for _, of in sorted(state.items()) for v in of.values()]
                case 5:
                    model.eval()
                    with torch.no_grad():
                        seen.append(loss_of(model, 0))
                    model.train()
                case 6:
                    seen += [p.detach() for p in copy.deepcopy(model).parameters()]
                case 7:
                    seen.append(torch.stack([p.detach().norm() for p in model.parameters()]))
                case 8:
                    seen += [p.detach() for p in pickle.loads(pickle.dumps(model.last)).parameters()]
                case 9:
                    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                case 10:
                    model.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                    extra = nn.Linear(2, 2)
                    model.extra = extra
                    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.5})
        return seen

    both("watched", watched, OPTIMIZERS["adam"])


def test_states_are_broadcast_after_whole_steps():
    def broadcast(model, optimizer):
        train(model, optimizer, 3, schedule=False)
        hvd.broadcast_optimizer_state(optimizer, 0)
        hvd.broadcast_parameters(model.state_dict(), 0)
        train(model, optimizer, 2, schedule=False)

    both("broadcast", broadcast, OPTIMIZERS["adam"])


def test_closures_and_step_hooks_are_called_once_and_hooks_see_whole_steps():
    def closed(model, optimizer):
        seen = []
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(torch.ones(len(o.param_groups[0]["params"]))))
        for step in range(6):
            if step == 3:
                optimizer.register_step_post_hook(lambda *_: seen.append(model.first.weight.detach().clone()))

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            seen.append(optimizer.step(closure).detach())
        return seen

    seen = both("closure", closed)
    assert sum(s.shape == (32, 6) for s in seen) == 1 + 3


@pytest.mark.skipif(RELEASE < (2, 5), reason="it does not compile hooks that have weak references")
def test_code_that_is_compiled_waits_before_it():
    def compiled(model, optimizer):
        whole = torch.compile(model, backend="eager", fullgraph=True)
        for step in range(5):
            whole(torch.full((2, 4), float(step + hvd.rank()))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    both("compiled", compiled, model_of=lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))


def test_sparse_gradients_are_stepped_like_others():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.out = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.words(x))

    def read(model, optimizer):
        for step in range(5):
            model(torch.tensor([step, 3, hvd.rank()])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    both("sparse", read, lambda groups: torch.optim.SGD(groups, lr=0.1), Words)


def test_sparse_gradients_of_a_group_are_each_stepped_with_their_sum(rank, size):
    tables = [nn.Embedding(4, 2, sparse=True) for _ in range(2)]
    for table in tables:
        nn.init.zeros_(table.weight)
    named = [(f"sparse of a group {i}", table.weight) for i, table in enumerate(tables)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in named], lr=1.0), named, sparse_as_dense=True, groups=1, cross_barrier=True
    )
    for _ in range(2):
        (sum(table(torch.tensor([1])).sum() for table in tables) * (rank + 1.0)).backward()
        optimizer.step()
        optimizer.agree()
        optimizer.zero_grad()
    for table in tables:
        assert table.weight[1].tolist() == [-(size + 1.0)] * 2 and not table.weight[0].any()


def test_gradients_that_are_not_reduced_are_stepped_too():
    def thawed(model, optimizer):
        train(model, optimizer, 2)
        model.frozen.requires_grad_(True)
        train(model, optimizer, 3)

    def make():
        torch.manual_seed(1)
        return Net()

    results = []
    for cross_barrier in (False, True):
        model = make()
        optimizer = optimizer_of(model, OPTIMIZERS["sgd"], f"thawed {cross_barrier}", cross_barrier)
        with pytest.MonkeyPatch.context() as patch:  # whose ranks rightly differ
            patch.setitem(engine._job["settings"], "check_parameters", 0)
            thawed(model, optimizer)
        results.append([p.detach().clone() for p in model.parameters()])
        hvd.barrier()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_parameter_that_is_used_without_its_module_is_an_error():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.direct = nn.Linear(2, 2), nn.Linear(2, 2), False

        def forward(self, x):
            return self.two(x + self.one.bias if self.direct else self.one(x))

    model = Changing()
    optimizer = optimizer_of(model, OPTIMIZERS["sgd"], "used", True)

    def iterate():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    for _ in range(3):
        iterate()
    model.direct = True
    with pytest.raises(RuntimeError, match=r"'used one\.bias' was used before its step had ended"):
        iterate()
    optimizer.step()
    optimizer.agree()  # as the message says
    iterate()
    optimizer.agree()


def test_a_parameter_that_changes_before_its_step_is_an_error():
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model, OPTIMIZERS["sgd"], "written", True)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with torch.no_grad():
        model.bias += 1
    with pytest.raises(RuntimeError, match="'written bias' was changed between"):
        model(torch.ones(1, 2))
    hvd.broadcast_parameters(model.state_dict(), 0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.agree()


def test_shutdown_ends_the_last_step_and_a_dropped_optimizer_has_made_it():
    weights = []
    for cross_barrier in (False, True):
        torch.manual_seed(7)
        model = Net()
        optimizer = optimizer_of(model, OPTIMIZERS["sgd"], f"ends {cross_barrier}", cross_barrier)
        train(model, optimizer, 3)
        del optimizer
        gc.collect()
        assert bool(_cross_barrier._unsettled) is cross_barrier
        hvd.shutdown()
        assert not _cross_barrier._unsettled
        weights.append([p.detach().clone() for p in model.parameters()])
        hvd.init(process_sets="dynamic", settings=IN_ORDER)
    for a, b in zip(*weights, strict=True):
        assert torch.equal(a, b)


def test_a_lost_peer_is_an_error_in_the_next_forward_and_nothing_waits_then(rank, size, tmp_path):
    folder = Path(hvd.broadcast_object(str(tmp_path), root_rank=0))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = optimizer_of(model, OPTIMIZERS["sgd"], "lost", True)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    optimizer.agree()
    if rank == 0:
        hvd.shutdown()
    else:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        with pytest.raises(hvd.HorovodInternalError, match=r"lost [01]\.(weight|bias).* rank 0 has shut down"):
            model(torch.ones(1, 4))
        assert not _cross_barrier._unsettled and not optimizer._steps
        (folder / str(rank)).touch()
        while not all((folder / str(other)).exists() for other in range(1, size)):
            time.sleep(0.01)  # else a rank that comes late may hear of this one's shutdown first
        hvd.shutdown()
    hvd.init(process_sets="dynamic", settings=IN_ORDER)


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (torch.optim.LBFGS, {}, "LBFGS, which evaluates the loss again"),
        (lambda params: torch.optim.SGD(params, lr=0.1, differentiable=True), {}, "which is differentiable"),
        (OPTIMIZERS["sgd"], {"sync": "ssp:3"}, "servers hold the parameters"),
        (OPTIMIZERS["sgd"], {"op": hvd.Adasum}, "combines the ranks' steps"),
    ],
    ids=["lbfgs", "differentiable", "held", "adasum"],
)
def test_what_cannot_be_stepped_one_by_one_is_refused(make, options, text):
    with pytest.raises(ValueError, match=text):
        hvd.DistributedOptimizer(make([nn.Parameter(torch.zeros(2))]), cross_barrier=True, **options)


def test_a_step_that_changes_options_of_all_parameters_is_refused():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
            return super().step(closure)

    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(Counting([weight], lr=1), [("counting", weight)], cross_barrier=True)
    weight.sum().backward()
    with pytest.raises(ValueError, match="cross_barrier: the optimizer's step changes steps of all parameters"):
        optimizer.step()
    hvd.barrier()


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16], ids=["none", "fp16"])
def test_a_failed_reduction_is_the_error_and_nothing_of_it_stays(rank, compression):
    model = nn.Module()
    model.same, model.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3 + min(rank, 1)))
    named = [(f"fails {compression.__name__} {name}", p) for name, p in model.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named, cross_barrier=True, compression=compression)
    for _ in range(3):
        optimizer.zero_grad()
        (model.same.sum() + model.other.sum()).backward()
        with pytest.raises(hvd.HorovodInternalError, match=r"ranks disagree about .* other"):
            optimizer.step()
            optimizer.agree()
        optimizer.agree()
        assert len(model.state_dict()) == 2


def test_modules_that_are_gone_are_forgotten():
    """Also of other models, whose forward passes run beside the training."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), [(f"gone {n}", p) for n, p in model.named_parameters()],
        cross_barrier=True,
    )  # fmt: skip
    gone = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        other = nn.Sequential(nn.Linear(3, 3))
        other(torch.ones(1, 3))
        gone.append(weakref.ref(other))
        del other
    optimizer.agree()
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
