"""A gradient that the program changes while it is exchanged is an error, with the recipe, for every optimizer."""

import pytest
import torch
from nets import RELEASE
from torch import nn

import paceline
import paceline.torch as hvd

CHANGES = {
    "clipped": lambda ps: nn.utils.clip_grad_norm_(ps, 1e-3),
    "clipped one by one": lambda ps: nn.utils.clip_grad_norm_(ps, 1e-3, foreach=False),
    "clipped by value": lambda ps: nn.utils.clip_grad_value_(ps, 1e-3),
    "multiplied": lambda ps: ps[0].grad.mul_(2),
    "through a view": lambda ps: ps[0].grad.view(-1)[0].zero_(),
    "detached": lambda ps: ps[0].grad.detach().add_(1),
    "replaced": lambda ps: setattr(ps[0], "grad", ps[0].grad * 2),
    "dropped": lambda ps: setattr(ps[0], "grad", None),
    "given other memory": lambda ps: setattr(ps[0].grad, "data", ps[0].grad.data.clamp(-1e-3, 1e-3)),
}
KINDS = {
    "plain": {},
    "sum": {"op": hvd.Sum},
    "grouped": {"groups": 1},
    "two groups": {"groups": 2},
    "two passes": {"backward_passes_per_step": 2},
    "fp16": {"compression": hvd.Compression.fp16},
    "codec": {"compression": "int8"},
    "gate": {"gate": paceline.Significance(1e9)},
    "drop-stragglers": {"sync": "drop-stragglers:1"},
    "Adasum": {"op": hvd.Adasum},
    "wait-free": {"sync": "asp", "wait_free": True},
}


def make(what, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        [(f"{what} {n}", p) for n, p in model.named_parameters()],
        **options,
    )
    return model, optimizer


def backward(model, optimizer, options):
    optimizer.zero_grad()
    for _ in range(options.get("backward_passes_per_step", 1)):
        (model(torch.ones(4, 40) * (1 + hvd.rank())) ** 2).sum().backward()


def train(model, optimizer, options, steps=2):
    for _ in range(steps):
        backward(model, optimizer, options)
        optimizer.step()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_between_backward_and_step_is_an_error(kind, change, size):
    if size == 1:
        return
    options = KINDS[kind]
    model, optimizer = make(f"{kind} {change}", **options)
    train(model, optimizer, options)  # not in the first iteration of wait-free, which starts nothing in backward
    backward(model, optimizer, options)
    CHANGES[change](list(model.parameters()))
    recipe = r"skip_synchronize" if kind not in ("Adasum", "wait-free") else r"register_hook"
    with pytest.raises(RuntimeError, match=rf"(?s)'{kind} {change} 0\.weight'.*{recipe}") as caught:
        optimizer.step()
    assert not isinstance(caught.value, hvd.HorovodInternalError)
    train(model, optimizer, options)  # the job goes on
    hvd.barrier()


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("Adasum", "wait-free")])
def test_the_recipe_clips_the_average(kind, size):
    options = KINDS[kind]
    model, optimizer = make(f"recipe {kind}", **options)
    for _ in range(3):
        backward(model, optimizer, options)
        optimizer.synchronize()
        before = [p.detach().clone() for p in model.parameters()]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        moved = sum((p.detach() - b).square().sum() for p, b in zip(model.parameters(), before, strict=True)).sqrt()
        assert moved <= 0.01 * 1.001
    for p in model.parameters():
        assert (hvd.allgather(p.detach()[None]) == p).all()


def test_the_memory_of_a_tensor_in_flight_lives_until_the_engine_has_ended(size):
    """Also where the tensor gets other memory: the next tensors of its size do not get what the engine writes to."""
    if size == 1:
        return
    for count in (100, 1_000_000):  # in malloc's arena, and mapped
        for step in range(4):  # the first ones are not like those before
            tensors = {n: torch.ones(count) for n in ("data", "set_", "broadcast", "allgather", "alltoall", "input")}
            handles = [
                hvd.allreduce_async_(tensors["data"], op=hvd.Sum, name=f"data {count}"),
                hvd.allreduce_async_(tensors["set_"], op=hvd.Sum, name=f"set {count}"),
                hvd.broadcast_async_(tensors["broadcast"], 0, name=f"broadcast {count}"),
                hvd.allgather_async(tensors["allgather"], name=f"allgather {count}"),
                hvd.alltoall_async(tensors["alltoall"], name=f"alltoall {count}"),
                hvd.allreduce_async(tensors["input"], op=hvd.Sum, name=f"input {count}"),
            ]
            for t in tensors.values():
                t.data = torch.zeros(count)
            tensors["set_"].set_()
            others = [torch.full((count,), -1.0) for _ in range(8)]
            for handle in handles[:3]:
                with pytest.raises(RuntimeError, match="got other memory while an operation") as caught:
                    hvd.synchronize(handle)
                assert not isinstance(caught.value, hvd.HorovodInternalError)
            gathered, (exchanged, _), total = map(hvd.synchronize, handles[3:])
            assert (gathered == 1).all() and (exchanged == 1).all() and (total == size).all(), step
            assert all((other == -1).all() for other in others)


def test_memory_that_a_resized_storage_has_freed_is_an_error(size):
    """As far as the process lives: an operation that has ended cannot be hurt any more."""
    t = torch.ones(1000)
    handle = hvd.allgather_async(t, name="freed")
    while not hvd.poll(handle):
        pass
    t.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="got other memory while an operation"):
        hvd.synchronize(handle)


def test_a_step_without_synchronization_of_what_is_in_flight_is_an_error(size):
    if size == 1:
        return
    model, optimizer = make("skipped")
    train(model, optimizer, {})
    backward(model, optimizer, {})
    with pytest.raises(RuntimeError, match=r"call optimizer\.synchronize\(\) first"), optimizer.skip_synchronize():
        optimizer.step()
    optimizer.step()
    hvd.barrier()


def clips_sparse_gradients():
    """Whether this PyTorch does."""
    p = nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.eye(2).to_sparse()
    try:
        CHANGES["clipped"]([p])
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("change", ["clipped", "multiplied", "replaced", "dropped"])
def test_a_sparse_gradient_too(as_dense, change, size):
    if size == 1:
        return
    if change == "clipped" and not clips_sparse_gradients():
        pytest.skip("this PyTorch does not clip sparse gradients")
    table = nn.Embedding(10, 3, sparse=True)
    name = f"sparse {as_dense} {change}"
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=0.1), [(name, table.weight)], sparse_as_dense=as_dense
    )

    def backward():
        optimizer.zero_grad()
        (table(torch.tensor([1, 1 + hvd.rank()])) ** 2).sum().backward()

    backward()
    optimizer.step()
    backward()
    CHANGES[change]([table.weight])
    with pytest.raises(RuntimeError, match=f"'{name}'"):
        optimizer.step()
    backward()
    optimizer.step()
    hvd.barrier()


@pytest.mark.skipif(RELEASE < (2, 3), reason="its GradScaler is for CUDA alone")
@pytest.mark.parametrize("init", [1.0, 2.0**16])
def test_mixed_precision_unscales_after_synchronize(init, size):
    """As in Horovod's examples; without it the scaler unscales what is in flight."""
    model, optimizer = make(f"amp {init}")
    scaler = torch.amp.GradScaler("cpu", init_scale=init)

    def backward():
        optimizer.zero_grad()
        scaler.scale((model(torch.ones(4, 40)) ** 2).sum()).backward()

    def expected():
        return torch.autograd.grad((model(torch.ones(4, 40)) ** 2).sum(), list(model.parameters()))

    if size > 1:
        backward()
        for change in (scaler.unscale_, scaler.step):
            with pytest.raises(RuntimeError, match=r"(?s)GradScaler.*skip_synchronize"):
                change(optimizer)
        optimizer.synchronize()
    for _ in range(3):
        backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        assert all(torch.equal(p.grad, q) for p, q in zip(model.parameters(), expected(), strict=True))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    for p in model.parameters():
        assert p.isfinite().all() and (hvd.allgather(p.detach()[None]) == p).all()


def test_what_leaves_gradients_alone_is_none():
    """Reading, norms, a retained graph, a closure, and an optimizer that changes gradients in its own step."""

    class Decays(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.add_(p, alpha=1e-4)
            return super().step(closure)

    for kind, options in KINDS.items():
        torch.manual_seed(1)
        model = nn.Linear(5, 5)
        optimizer = hvd.DistributedOptimizer(
            Decays(model.parameters(), lr=0.01),
            [(f"alone {kind} {n}", p) for n, p in model.named_parameters()],
            **options,
        )
        for _ in range(3):
            passes = options.get("backward_passes_per_step", 1)
            optimizer.zero_grad()
            loss = model(torch.ones(2, 5)).square().sum()
            for i in range(passes):
                loss.backward(retain_graph=i + 1 < passes)
            torch.autograd.grad(model(torch.ones(2, 5)).sum(), list(model.parameters()))
            optimizer.step()
        hvd.barrier()


def test_a_closure_may_clip_nothing_in_flight():
    model, optimizer = make("closure")

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 40)).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        assert optimizer.step(closure) > 0
    hvd.barrier()
