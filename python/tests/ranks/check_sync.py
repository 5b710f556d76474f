"""Synchronisation models: DistributedOptimizer(sync=...), declared values, and what is refused."""

import time

import pytest
import torch

import paceline
import paceline.torch as hvd
from paceline.common.engine import engine

MODELS = [
    paceline.BSP(),
    paceline.ASP(),
    paceline.SSP(0),
    paceline.SSP(3),
    paceline.SSP(2, parking="soft-barrier"),
    paceline.SSP(2, cached=True),
    paceline.DSPS(1, 4),
    paceline.PSSP(1, 0.5, seed=3),
    paceline.DynamicPSSP(1, 0.5),
    paceline.DynamicPSSP(1, "significance"),
    paceline.Adaptive(1, 1),
    paceline.Adaptive(2, 5),
    paceline.ElasticBSP(4),
    paceline.DropStragglers(1),
    paceline.Expression("lead < 2 || significance < 0.01"),
    paceline.Expression("lead < 3", "count[V] >= N"),
]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
}
TRUTH = torch.tensor([1.5, -2.0, 0.5, 3.0], dtype=torch.float64)


def net():
    torch.manual_seed(1 + hvd.rank())  # the first step gives everybody rank 0's parameters
    return torch.nn.Linear(4, 1).double()


def loss_of(model, step):
    generator = torch.Generator().manual_seed(1000 * hvd.rank() + step)
    x = torch.randn(16, 4, dtype=torch.float64, generator=generator)
    return (model(x).squeeze() - x @ TRUTH).square().mean()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("sync", MODELS, ids=lambda m: f"{m.setting} {m.parking} {m.cached}")
def test_a_script_trains_to_the_truth_under_every_model(sync, kind):
    model = net()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    name = f"{sync} {kind}"
    optimizer = OPTIMIZERS[kind](model.parameters())
    named = [(f"{name} {n}", p) for n, p in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, sync=sync)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.985)
    for step in range(150):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        schedule.step()
    optimizer.agree()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert (hvd.allgather(model.weight.detach()) == model.weight).all()
    torch.testing.assert_close(model.weight.detach().squeeze(), TRUTH, rtol=0, atol=0.15)
    hvd.barrier()


def test_bsp_over_a_held_value_equals_the_mean_gradient():
    """SSP(0) is BSP, and the mean of the ranks' SGD steps is the step of their mean gradient."""
    held, reduced = net(), net()
    for model in (held, reduced):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    steps = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            named_parameters=[(f"equal {sync} {n}", p) for n, p in model.named_parameters()],
            sync=sync,
        )
        for model, sync in ((held, "ssp:0"), (reduced, None))
    ]
    for step in range(10):
        for model, optimizer in zip((held, reduced), steps, strict=True):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        torch.testing.assert_close(held.weight, reduced.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_value_is_what_all_have_pushed(dtype):
    start = torch.full((3, 5), 2.0 if hvd.rank() == 0 else -1.0, dtype=dtype)
    value = hvd.declare(start, f"value {dtype}", sync=paceline.ASP(), op=hvd.Sum)
    assert (start == 2).all()
    for _ in range(4):
        value.push(torch.full((3, 5), 0.5, dtype=dtype))
        value.push(torch.full((3, 5), 0.5, dtype=dtype))
        value.clock()
    hvd.synchronize(value.pull(wait=False))
    value.sync()
    hvd.barrier()
    everything = hvd.synchronize(value.pull(wait=False))
    assert (everything == 2 + 4 * hvd.size()).all()


@pytest.mark.parametrize("sync", [paceline.Adaptive(2, 3), paceline.ElasticBSP(3)], ids=lambda m: m.setting)
def test_supersteps_end_in_barriers_and_slow_ranks_do_fewer_iterations(sync, tmp_path, monkeypatch):
    """Rank 0 computes while each other rank does three iterations, or until that waits for it at a barrier."""
    rank, others = hvd.rank(), range(1, hvd.size())
    model = net()
    named = [(f"supersteps {sync} {n}", p) for n, p in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=named, sync=sync
    )
    file = hvd.broadcast_object(str(tmp_path / "progress"), root_rank=0)
    counts = torch.from_file(file, shared=True, size=2 * hvd.size() + 1, dtype=torch.int64)  # every rank's memory
    steps, ended, over = counts[: hvd.size()], counts[hvd.size() : -1], counts[-1]
    hvd.barrier()
    end_iteration = engine.end_iteration

    def where():
        (w,) = [s for s in paceline.supersteps() if f"supersteps {sync}" in s["value"]]
        return w

    def end_and_tell(*group):
        last = end_iteration(*group)
        ended[rank] = where()["superstep"]
        return last

    def compute():
        began, deadline = steps.clone(), time.monotonic() + 600
        while any(steps[r] < began[r] + 3 and ended[r] <= where()["superstep"] for r in others):
            assert time.monotonic() < deadline, f"rank 0 waits for others' iterations: {steps}, supersteps {ended}"
            time.sleep(0.001)

    monkeypatch.setattr(engine, "end_iteration", end_and_tell)
    thresholds = []
    while not over:
        optimizer.zero_grad()
        loss_of(model, int(steps[rank])).backward()
        if rank == 0 and steps[0]:  # before the first, nobody has declared the values
            compute()
        optimizer.step()
        steps[rank] += 1
        thresholds.append((where()["s"], where()["w"]))
        if rank == 0 and where()["superstep"] >= 8:
            over.fill_(1)
    hvd.barrier()
    assert (steps[1:] > steps[0]).all() and (steps[1:] > ended[1:]).all(), (steps, ended)
    if sync.setting.startswith("adaptive"):  # 3 times as slow: the thresholds have risen
        assert max(s for s, _ in thresholds) > 2 and max(w for _, w in thresholds) > 3, thresholds


@pytest.mark.parametrize("sync", [paceline.Adaptive(1, 1), paceline.ElasticBSP(2)], ids=lambda m: m.setting)
def test_ranks_in_other_operations_hold_nobody_at_a_barrier(sync):
    models = [net(), net()]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(m.parameters(), lr=0.05),
            named_parameters=[(f"elsewhere {sync} {i} {n}", p) for n, p in m.named_parameters()],
            sync=sync,
        )
        for i, m in enumerate(models)
    ]
    for epoch in range(4):
        for step in range(5 + 3 * ((hvd.rank() + epoch) % 2)):  # ranks come unequally often
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
        handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name=f"metric {sync}")
        optimizers[1].step()  # with an operation in flight
        assert hvd.synchronize(handle)[0] == hvd.size()
        assert hvd.allgather(torch.tensor([epoch])).eq(epoch).all()
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.agree()
        assert (hvd.allgather(model.weight.detach()) == model.weight).all()


def test_parameters_frozen_for_a_while_stay_in_their_supersteps():
    model = net()
    named = [(f"frozen {n}", p) for n, p in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=named, sync=paceline.Adaptive(1, 1)
    )
    for frozen in (False, True, False):
        model.bias.requires_grad_(not frozen)
        for step in range(6 + 5 * (hvd.rank() % 2)):  # the others' supersteps end without a rank that waits below
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        hvd.barrier()
    optimizer.agree()
    for p in model.parameters():
        assert (hvd.allgather(p.detach()[None]) == p).all()


def test_parameters_can_be_added_and_ranks_join_between_supersteps():
    model = net()
    named = [(f"more {n}", p) for n, p in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=named, sync="elastic:2"
    )
    extra = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))

    def train(steps):
        for step in range(steps):
            optimizer.zero_grad()
            (loss_of(model, step) + (extra - 1).square().sum()).backward()
            optimizer.step()

    train(20)
    optimizer.add_param_group({"params": [extra]})
    train(40)
    hvd.join()
    train(20)
    optimizer.agree()
    assert (hvd.allgather(extra.detach().view(1, 3)) == extra).all()
    torch.testing.assert_close(extra.detach(), torch.ones(3), rtol=0, atol=0.05)


def test_pulls_that_had_to_wait_are_counted():
    value = hvd.declare(torch.zeros(2), "counted", sync=paceline.SSP(0))
    before = paceline.tally()

    def counted(what):
        return int(hvd.allreduce(torch.tensor(paceline.tally()[what] - before[what]), op=hvd.Sum))

    # On a crowded machine rank 0 may still overtake a pull that was begun earlier: then it comes again.
    for iteration in range(1, 101):
        handle = None
        for turn in (False, True):  # rank 0 comes when the others wait
            if turn is (hvd.rank() == 0):
                value.clock()
                handle = value.pull()
            if not turn:
                hvd.barrier()
        hvd.synchronize(handle)
        hvd.barrier()
        if iteration >= 3 and counted("delayed") >= hvd.size() - 1:
            break
    assert counted("admitted") >= iteration * hvd.size() and counted("delayed") >= hvd.size() - 1


def test_an_iteration_without_a_push_counts_too():
    value = hvd.declare(torch.zeros(2), "silent", sync=paceline.SSP(0), op=hvd.Sum)
    for i in range(3):
        if hvd.rank() == 0:
            value.push(torch.ones(2))
        value.clock()
        assert value.sync()[0] in (i + 1, i + 2)  # rank 0 may have ended its next iteration before this read


def test_an_iteration_that_cannot_end_yet_keeps_its_push():
    value = hvd.declare(torch.zeros(2), "kept", sync=paceline.SSP(0), op=hvd.Sum)
    if hvd.rank() == 0:
        value.clock()
        handle = value.pull()  # waits for the others
        value.push(torch.ones(2))
        with pytest.raises(ValueError, match="in flight"):
            value.clock()
        hvd.barrier()
        hvd.synchronize(handle)
    else:
        hvd.barrier()
        value.clock()
    value.clock()
    assert value.sync().tolist() == [1.0, 1.0]
    hvd.barrier()


def test_a_value_of_a_transposed_tensor_keeps_its_shape():
    tensor = torch.arange(6.0).reshape(2, 3).t()
    value = hvd.declare(tensor, "transposed", sync="asp")
    torch.testing.assert_close(value.sync(), torch.arange(6.0).reshape(2, 3).t())
    hvd.barrier()


@pytest.mark.parametrize("how", ["every k iterations", "without waiting"])
def test_batch_norm_statistics_go_beside_weights_under_ssp(how):
    """FluentPS's mixed use: the strictest key bounds the worker, so statistics have a condition that seldom delays."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    named = [(f"{how} {n}", p) for n, p in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02), named_parameters=named, sync=paceline.SSP(3)
    )
    statistics = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
    hvd.broadcast_parameters(statistics, root_rank=0)
    held = {n: hvd.declare(b, f"{how} {n}", sync=paceline.ASP()) for n, b in statistics.items()}
    asked = {}
    for step in range(60):
        before = {n: b.clone() for n, b in statistics.items()}
        optimizer.zero_grad()
        x = torch.randn(16, 4) + 3
        (model(x).squeeze() - x.sum(1)).square().mean().backward()
        optimizer.step()
        if how == "every k iterations":
            if step % 10 == 9:
                hvd.grouped_allreduce_(list(statistics.values()), name=f"{how} {step}")
            continue
        for n, b in statistics.items():
            if n in asked:
                b.copy_(hvd.synchronize(asked[n]) + (b - before[n]))
            held[n].push(b - before[n])
            held[n].clock()
            asked[n] = held[n].pull(wait=False)
    for handle in asked.values():
        hvd.synchronize(handle)
    optimizer.agree()
    if how == "without waiting":
        hvd.barrier()
        for n, b in statistics.items():
            b.copy_(hvd.synchronize(held[n].pull(wait=False)))
    for n, b in statistics.items():
        assert (hvd.allgather(b.view(1, -1)) == b).all(), n
    assert statistics["1.running_mean"].abs().max() > 0.1
    hvd.barrier()


def test_a_statistic_can_be_read_without_waiting_for_anybody():
    value = hvd.declare(torch.zeros(1), "statistic", sync=paceline.BSP(), op=hvd.Sum)
    if hvd.rank() == 0:
        value.push(torch.ones(1))
        value.clock()
        assert hvd.synchronize(value.pull(wait=False)).item() == 1
    hvd.barrier()


@pytest.mark.parametrize(
    ("sync", "text"),
    [
        (paceline.SSP(-1), "-1"),
        (paceline.PSSP(1, 1.5), "1.5"),
        (paceline.DynamicPSSP(1, 2.0), "2"),
        (paceline.DropStragglers(1000), "1000"),
        (paceline.Expression("1 / V > 0"), "V"),
        (paceline.Expression("lead <"), "lead <"),
        (paceline.DSPS(5, 3), "5,3"),
        ("ssp", "ssp"),
        ("nothing:1", "known are"),
        (7, "paceline.SSP"),
    ],
    ids=str,
)
def test_a_model_that_cannot_run_is_refused_before_training(sync, text):
    parameter = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=text):
        hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1), sync=sync)


def test_what_does_not_go_with_a_model_is_refused():
    def make(**options):
        parameter = torch.nn.Parameter(torch.zeros(2))
        return hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1), sync="ssp:1", **options)

    with pytest.raises(ValueError, match=r"Compression\.none"):
        make(compression=hvd.Compression.fp16)
    with pytest.raises(ValueError, match="op=Average or Sum"):
        make(op=hvd.Adasum)
    with pytest.raises(ValueError, match="lazy and soft-barrier"):
        paceline.SSP(1, parking="none")
    with pytest.raises(ValueError, match="lazy"):
        hvd.DistributedOptimizer(
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1), sync=paceline.BSP(parking="soft-barrier")
        )
    for name in (None, "", 3, ["a list"]):
        with pytest.raises(ValueError, match=r"^name=.*: a value needs a name"):
            hvd.declare(torch.zeros(2), name, sync="asp")
    for root in ("0", None, 0.5):
        with pytest.raises(ValueError, match=r"^root rank .*: give an int"):
            hvd.declare(torch.zeros(2), "a wrong root", root_rank=root, sync="asp")
    value = hvd.declare(torch.zeros(2), "shapes", sync="asp")
    with pytest.raises(ValueError, match="shape"):
        value.push(torch.zeros(3))
    with pytest.raises(ValueError, match="has a value already"):
        hvd.declare(torch.zeros(2), "shapes", sync="asp")
    with pytest.raises(ValueError, match="supersteps are DistributedOptimizer's"):
        hvd.declare(torch.zeros(2), "supersteps", sync=paceline.ElasticBSP())
    with pytest.raises(ValueError, match="floating-point"):
        hvd.declare(torch.zeros(2, dtype=torch.int32), "whole numbers", sync="asp")
    hvd.barrier()


def test_optimizers_without_names_do_not_meet_and_go_on_after_a_join():
    models = [net(), net()]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.05), sync="ssp:1") for m in models]

    def train(steps):
        for step in range(steps):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()

    train(30)
    hvd.join()
    train(30)
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.agree()
        assert (hvd.allgather(model.weight.detach()) == model.weight).all()
        torch.testing.assert_close(model.weight.detach().squeeze(), TRUTH, rtol=0, atol=0.3)


def test_a_value_whose_root_has_joined_is_an_error():
    if hvd.rank() == 0:
        hvd.join()
    else:
        with pytest.raises(hvd.HorovodInternalError, match="root, rank 0, has joined"):
            hvd.declare(torch.zeros(2), "rootless", sync="asp")
        hvd.join()
    hvd.barrier()


def test_a_condition_changes_on_the_given_servers_only(size):
    """The value's one partition lies on one of the servers; the others have nothing to change."""
    value = hvd.declare(torch.zeros(2), "on one server", sync=paceline.SSP(0))
    if hvd.rank() == 0:
        changed = []
        for server in range(size):
            try:
                paceline.set_pull_condition(paceline.ASP(), names="on one server", servers=[server])
                changed.append(server)
            except ValueError as e:
                assert "no tensor in use there" in str(e)
        assert len(changed) == 1
        with pytest.raises(ValueError, match=f"server {size}, the job has {size}"):
            paceline.set_pull_condition(paceline.ASP(), servers=[size])
        value.clock()
        value.sync()  # under SSP(0) it would wait for the others
    hvd.barrier()


def test_a_model_changes_while_training_runs():
    model = net()
    named = [(f"changing {n}", p) for n, p in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=named, sync="ssp:0"
    )
    for step in range(60):
        if step == 20 and hvd.rank() == 0:
            assert paceline.set_pull_condition(paceline.SSP(5), names="value.changing *") >= 20
        if step == 40 and hvd.rank() == hvd.size() - 1:
            paceline.set_pull_condition("lead < 2", names=["value.changing *"])
            paceline.set_push_condition("count[V] >= N - 1", names=["value.changing *"])
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight.detach().squeeze(), TRUTH, rtol=0, atol=0.3)
    with pytest.raises(ValueError, match="declare the tensor as accumulate"):
        hvd.allreduce(torch.zeros(3), name="plain sum")
        paceline.set_pull_condition(paceline.ASP(), names=["plain sum"])
    for words, wrong in (
        ("condition=3: give a model", [3]),
        ("names=7: give patterns", ["lead < 3", 7]),
        (r"names=\[7\]: give patterns", ["lead < 3", [7]]),
        ("servers='x': give indices", ["lead < 3", (), "x"]),
        ("servers=1: give indices", ["lead < 3", (), 1]),
        (r"servers=\[0.5\]: give indices", ["lead < 3", (), [0.5]]),
    ):
        for change in (paceline.set_pull_condition, paceline.set_push_condition):
            with pytest.raises(ValueError, match=words):
                change(*wrong)
    with pytest.raises(ValueError, match="no tensor in use"):
        paceline.set_pull_condition(paceline.ASP(), names=["nothing of that name"])
    hvd.barrier()
