"""Broadcasts of parameters, optimizer states and objects; gathering of objects."""

import copy

import pytest
import torch

import paceline.torch as hvd


def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    )


def same_everywhere(tensor):
    return all(torch.equal(tensor, other) for other in hvd.allgather(tensor.detach().unsqueeze(0)))


@pytest.mark.parametrize("form", ["state_dict", "named_parameters", "parameters", "iterator"])
def test_broadcast_parameters_takes_what_models_give(form, rank):
    ours, roots = model(rank), model(1)
    given = {
        "state_dict": ours.state_dict(),
        "named_parameters": list(ours.named_parameters()),
        "parameters": list(ours.parameters()),
        "iterator": ours.named_parameters(),
    }[form]
    hvd.broadcast_parameters(given, root_rank=1)
    for mine, root in zip(ours.parameters(), roots.parameters(), strict=True):
        assert torch.equal(mine, root) and mine.requires_grad


@pytest.mark.parametrize("wrong", [3, "weight", torch.ones(2)], ids=str)
def test_broadcast_parameters_refuses_anything_else(wrong):
    with pytest.raises(ValueError, match="dict or a list"):
        hvd.broadcast_parameters(wrong, root_rank=0)


@pytest.mark.parametrize("wrong", [{"w": torch.ones(2), "extra": 3}, [torch.ones(2), None]], ids=str)
def test_broadcast_parameters_refuses_an_entry_that_is_no_tensor(wrong):
    named = "'extra' is no tensor but of type int" if isinstance(wrong, dict) else "an entry is no tensor"
    with pytest.raises(ValueError, match=named):
        hvd.broadcast_parameters(wrong, root_rank=0)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95)),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Rprop": torch.optim.Rprop,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.1, centered=True),
    "NAdam": torch.optim.NAdam,
}


def train(net, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.rand(4, 1, 4, 4)).square().sum().backward()
        optimizer.step()


def flat(optimizer):
    """Options and state, tensors as lists: what two equal optimizers have in common."""

    def plain(x):
        if isinstance(x, dict):
            return {k: plain(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return type(x)(map(plain, x))
        return x.tolist() if isinstance(x, torch.Tensor) else x

    return plain(optimizer.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("who_has_trained", ["nobody", "root", "everybody", "others"])
def test_broadcast_optimizer_state_makes_all_like_the_root(name, who_has_trained, rank):
    net = model(0)
    optimizer = OPTIMIZERS[name](net.parameters())
    trained = {"nobody": False, "root": rank == 1, "everybody": True, "others": rank != 1}[who_has_trained]
    if trained:
        torch.manual_seed(rank)
        train(net, optimizer, steps=2 + rank)
    if rank == 1:
        optimizer.param_groups[0]["lr"] = 0.123
    weights = copy.deepcopy(net.state_dict())
    before = flat(optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert flat(optimizer) == hvd.broadcast_object(before, root_rank=1)
    assert optimizer.param_groups[0]["lr"] == 0.123
    assert all(torch.equal(v, weights[k]) for k, v in net.state_dict().items())
    train(net, optimizer, steps=1)


def test_optimizer_options_keep_their_types(rank):
    optimizer = torch.optim.Adam(model(0).parameters(), lr=0.1 * (rank + 1), betas=(0.5, 0.6), foreach=rank == 0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.1 and group["betas"] == (0.5, 0.6) and isinstance(group["betas"], tuple)
    assert group["foreach"] is True and group["amsgrad"] is False


def test_state_of_several_groups(rank):
    net = model(0)
    optimizer = torch.optim.SGD(
        [{"params": net[0].parameters()}, {"params": net[3].parameters(), "lr": rank + 1.0}], lr=0.1 * rank + 0.1
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 1.0]


def test_without_a_state_gradients_are_zero(rank):
    """Horovod initialises a missing state by a step with zero gradients, which scripts read afterwards."""
    net = model(0)
    net[0].bias.requires_grad_(False)
    net[0].weight.grad = torch.ones_like(net[0].weight)
    optimizer = torch.optim.Adam(net.parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for p in net.parameters():
        assert (p.grad is not None) == p.requires_grad
        assert p.grad is None or torch.equal(p.grad, torch.zeros_like(p))


def test_with_a_state_gradients_are_left_alone(rank):
    net = model(0)
    optimizer = torch.optim.Adam(net.parameters())
    train(net, optimizer, steps=1)
    grads = [p.grad.clone() for p in net.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), grads, strict=True))


@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.SGD])
def test_gradients_of_sparse_parameters_are_sparse_zeros(make):
    net = torch.nn.Embedding(5, 3, sparse=True)
    wrapped = hvd.DistributedOptimizer(make(net.parameters(), lr=0.1), net.named_parameters())
    hvd.broadcast_optimizer_state(wrapped, 0, net)
    assert net.weight.grad.is_sparse and torch.equal(net.weight.grad.to_dense(), torch.zeros(5, 3))
    for _ in range(2):
        wrapped.zero_grad(set_to_none=False)
        net(torch.tensor([1, 2])).sum().backward()
        wrapped.step()


def test_lbfgs_is_refused():
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model(0).parameters()), root_rank=0)


def test_an_optimizer_of_other_parameters_is_refused(rank):
    net = model(0)
    params = list(net.parameters())
    optimizer = torch.optim.SGD(params if rank == 0 else params[:-1], lr=0.1)
    if rank == 0:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    else:
        with pytest.raises(ValueError, match="must be alike"):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def test_state_of_a_distributed_optimizer(rank):
    net = model(0)
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1 + rank, momentum=0.9))
    hvd.broadcast_optimizer_state(wrapped, root_rank=0)
    assert wrapped.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    "obj",
    [None, {"epoch": 3, "best": [1.5]}, "text", b"x" * 100_000, (lambda x: x + 1)],
    ids=["None", "dict", "str", "bytes", "lambda"],
)
def test_broadcast_object(obj, rank, size):
    got = hvd.broadcast_object(obj if rank == size - 1 else None, root_rank=size - 1)
    assert got(1) == 2 if callable(obj) else got == obj


def test_broadcast_object_with_a_name(rank):
    assert hvd.broadcast_object([rank], root_rank=1, name="numbers") == [1]


def test_allgather_object(rank, size):
    assert hvd.allgather_object({"rank": rank, "data": "x" * rank}) == [
        {"rank": r, "data": "x" * r} for r in range(size)
    ]
    assert hvd.allgather_object(rank, name="ranks") == list(range(size))
