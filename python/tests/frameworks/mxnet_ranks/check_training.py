"""DistributedTrainer and DistributedOptimizer: the result is that of one process with the batches of all ranks."""

import copy
import json
import pickle
import warnings

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import paceline
import paceline.mxnet as hvd
from paceline.common import declaring


@pytest.fixture(scope="module", autouse=True)
def job():
    hvd.init()
    yield
    mx.nd.waitall()


def network(seed, shape=(4,)):
    mx.random.seed(seed)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(8, activation="tanh", in_units=shape[0]), gluon.nn.Dense(2, in_units=8))
    net.initialize(mx.init.Xavier())
    return net


def batches(step):
    """The batch of each rank."""
    draw = np.random.default_rng(step)
    return [mx.nd.array(draw.normal(size=(6, 4))) for _ in range(hvd.size())]


def backward(net, x):
    with autograd.record():
        loss = (net(x) ** 2).mean(axis=1)
    loss.backward()


def values(net):
    return [p.data().asnumpy() for p in net.collect_params().values()]


def alike(a, b, tolerance=1e-5):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def train(trainer_of, steps=5):
    """The parameters after training by all ranks, and after that of one process with all batches."""
    net, alone = network(1), network(1)
    trainer = trainer_of(net.collect_params())
    single = gluon.Trainer(alone.collect_params(), "sgd", {"learning_rate": 0.5, "momentum": 0.9}, kvstore=None)
    for step in range(steps):
        every = batches(step)
        backward(net, every[hvd.rank()])
        trainer.step(6)
        backward(alone, mx.nd.concat(*every, dim=0))
        single.step(6 * hvd.size())
    return values(net), values(alone)


@pytest.mark.parametrize("more", [{}, {"gradient_predivide_factor": 2.0, "prefix": "predivided."}])
def test_trainer_equals_one_process_with_all_batches(more):
    alike(*train(lambda params: hvd.DistributedTrainer(params, "sgd", {"learning_rate": 0.5, "momentum": 0.9}, **more)))


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.int8()], ids=["fp16", "int8"])
def test_trainer_with_compression(compression):
    options = {"learning_rate": 0.5, "momentum": 0.9}
    trained = train(lambda p: hvd.DistributedTrainer(p, "sgd", options, compression, prefix=f"{compression}."))
    alike(*trained, tolerance=0.05)
    first = trained[0][0]
    assert all((other == first).all() for other in hvd.allgather_object(first))


def test_optimizer_equals_one_process_with_all_batches():
    """Through gluon's own trainer, which calls update of any optimizer."""

    def trainer(params):
        wrapped = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.5, momentum=0.9))
        return gluon.Trainer(params, wrapped, kvstore=None)

    alike(*train(trainer))


def test_a_wrapped_optimizer_has_the_attributes_of_its_own_and_is_copied():
    wrapped = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.5))
    wrapped.rescale_grad = 0.25
    again = pickle.loads(pickle.dumps(copy.copy(wrapped)))
    assert again._optimizer.rescale_grad == wrapped._optimizer.rescale_grad == 0.25 and again.learning_rate == 0.5


def test_a_trainer_takes_the_optimizer_out_of_a_distributed_one():
    wrapped = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = hvd.DistributedTrainer(network(2).collect_params(), wrapped)
    assert any("averages the gradients itself" in str(w.message) for w in said)
    assert trainer._optimizer is wrapped._optimizer


def test_broadcast_of_parameters_there_and_to_come():
    net = network(10 + hvd.rank())
    hvd.broadcast_parameters(net.collect_params(), root_rank=1)
    alike(values(net), values(network(11)))
    later = gluon.nn.Dense(3)  # knows its shape with the first input
    mx.random.seed(20 + hvd.rank())
    later.initialize(mx.init.Xavier())
    hvd.broadcast_parameters(later.collect_params(), root_rank=0, prefix="later.")
    later(mx.nd.ones((2, 5)))
    alike(values(later), hvd.broadcast_object(values(later), 0))
    arrays = {"a": mx.nd.full((3,), hvd.rank()), "b": mx.nd.full((2, 2), hvd.rank())}
    hvd.broadcast_parameters(arrays, root_rank=1)
    assert arrays["a"].asnumpy().tolist() == [1, 1, 1] and arrays["b"].asnumpy().sum() == 4
    with pytest.raises(ValueError, match="a dict of arrays"):
        hvd.broadcast_parameters([1, 2])
    with pytest.raises(ValueError, match=r"params\['x'\] is an array or a parameter, not NoneType"):
        hvd.broadcast_parameters({"x": None})


def test_a_parameter_that_some_ranks_have_not_used_counts_as_zeros():
    used, unused = (gluon.nn.Dense(1, in_units=1, use_bias=False) for _ in range(2))
    for net in (used, unused):
        net.initialize(mx.init.Constant(1.0))
    params = [used.weight, unused.weight]
    trainer = hvd.DistributedTrainer(params, "sgd", {"learning_rate": 1.0, "wd": 0.5}, prefix="partly used.")
    expected = 1.0
    for _ in range(3):
        if hvd.rank() == 0:
            with autograd.record():
                loss = used(mx.nd.ones((1, 1))).sum()
            loss.backward()
        trainer.step(1, ignore_stale_grad=True)
        expected -= 1 / hvd.size() + 0.5 * expected
        assert used.weight.data().asscalar() == pytest.approx(expected)
        assert unused.weight.data().asscalar() == 1
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        trainer.step(1)


@pytest.mark.parametrize(
    "options", [{"compression": "topk:0.01"}, {"gate": paceline.Significance(0.5)}], ids=["topk", "gate"]
)
def test_a_gradient_that_no_rank_has_made_leaves_alone_what_is_held_back_of_it(options):
    def trained(stale):
        """The second of two parameters after eight steps with its gradient, and some without between them."""
        used, other = (gluon.Parameter(name, shape=(4096,)) for name in "ab")
        for parameter in used, other:
            parameter.initialize(mx.init.One())
        prefix = f"held back {stale} {options}."
        trainer = hvd.DistributedTrainer([used, other], "sgd", {"learning_rate": 0.125}, prefix=prefix, **options)
        for step in range(8):
            for parameters in [(used, other)] + [(used,)] * stale:
                gradient = mx.nd.array(np.random.default_rng(100 * step + hvd.rank()).integers(-8, 9, 4096) / 16)
                with autograd.record():
                    loss = sum((p.data() * gradient).sum() for p in parameters)
                loss.backward()
                trainer.step(1, ignore_stale_grad=True)
        return other.data().asnumpy()

    with_stale = trained(3)
    assert (with_stale != 1).any()
    np.testing.assert_array_equal(with_stale, trained(0))


def test_gradients_of_an_embedding():
    """They are sparse: the rows of the words that a batch has."""
    table = gluon.nn.Embedding(10, 3, sparse_grad=True)
    table.initialize(mx.init.One())
    trainer = hvd.DistributedTrainer(table.collect_params(), "sgd", {"learning_rate": 1.0}, prefix="embedding.")
    with autograd.record():
        loss = table(mx.nd.array([hvd.rank(), 9])).sum()
    loss.backward()
    trainer.step(1)
    expected = np.ones((10, 3))
    expected[: hvd.size()] -= 1 / hvd.size()
    expected[9] -= 1
    np.testing.assert_allclose(table.weight.data().asnumpy(), expected, rtol=1e-5)


def lean(trainer_of, steps=60):
    """The trainer after steps towards what is best on every rank, the parameter, and its best value."""
    weight = gluon.Parameter("weight", shape=(2000,))
    weight.initialize(mx.init.Zero())
    trainer = trainer_of([weight])
    best = np.random.default_rng(0).normal(size=2000)
    steepness = np.random.default_rng(hvd.rank()).uniform(0.5, 1.5, 2000)
    target, steepness = mx.nd.array(best), mx.nd.array(steepness)
    for _ in range(steps):
        with autograd.record():
            loss = (steepness * (weight.data() - target) ** 2).sum() / 2
        loss.backward()
        trainer.step(1)
    return trainer, weight, best


def identical(array):
    mine = array.asnumpy()
    return all((mine == other).all() for other in hvd.allgather_object(mine))


AHEAD = ["ssp:2", paceline.SSP(2, cached=True), paceline.ASP(), "pssp:2,0.5", "dsps:1,3", paceline.DynamicPSSP(2)]


@pytest.mark.parametrize("sync", [*AHEAD, "adaptive:3,3", "elastic:5", paceline.Expression("lead < 2")], ids=str)
def test_models_that_let_ranks_run_ahead_end_at_the_same_parameters(sync):
    trainer, weight, best = lean(
        lambda p: hvd.DistributedTrainer(p, "sgd", {"learning_rate": 0.1}, sync=sync, prefix=f"ahead {sync}.")
    )
    trainer.agree()
    assert identical(weight.data())
    np.testing.assert_allclose(weight.data().asnumpy(), best, atol=0.25)


def test_ssp_0_equals_one_process_with_all_batches():
    """Each rank's step of plain SGD is linear, so that the mean of the ranks' steps is the step of the mean."""
    options = {"learning_rate": 0.5}
    net, alone = network(1), network(1)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", options, sync="ssp:0", prefix="ssp 0.")
    single = gluon.Trainer(alone.collect_params(), "sgd", options, kvstore=None)
    for step in range(5):
        every = batches(step)
        backward(net, every[hvd.rank()])
        trainer.step(6)
        backward(alone, mx.nd.concat(*every, dim=0))
        single.step(6 * hvd.size())
    trainer.agree()
    alike(values(net), values(alone))


def test_ranks_begin_with_the_lowest_ranks_parameters():
    net = network(30 + hvd.rank())
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.0}, sync="ssp:1", prefix="begin.")
    backward(net, batches(0)[0])
    trainer.step(6)
    alike(values(net), values(network(30)))


def test_an_optimizer_whose_ranks_run_ahead():
    wrapped = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.1), sync="ssp:1", compression="int8")
    _, weight, best = lean(lambda p: gluon.Trainer(p, wrapped, kvstore=None))
    wrapped.agree()
    assert identical(weight.data())
    np.testing.assert_allclose(weight.data().asnumpy(), best, atol=0.25)


@pytest.mark.parametrize("restored", [False, True])
def test_the_threshold_of_an_optimizers_gate_decays_once_in_a_step(restored):
    """Though the optimizer steps some parameters at a time."""
    parameters = [gluon.Parameter(f"weight{i}", shape=(100,)) for i in range(20)]
    for parameter in parameters:
        parameter.initialize(mx.init.One())
    gate = paceline.Significance(0.5, decay=0.5)
    wrapped = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.1), sync="ssp:1", gate=gate)
    trainer = gluon.Trainer(parameters, wrapped, kvstore=None)
    for expected in (1, 1, 0.7):  # 0.1, 0.2 and 0.3 of the weights; the thresholds are 0.5, 0.35 and 0.29
        with autograd.record():
            loss = sum(p.data().sum() for p in parameters)
        loss.backward()
        trainer.step(1)
        wrapped.agree()
        for parameter in parameters:
            np.testing.assert_allclose(parameter.data().asnumpy(), expected, rtol=1e-5)
        if restored:
            state = paceline.compression_state()
            hvd.allreduce(mx.nd.zeros((1,))).asnumpy()
            paceline.load_compression_state(state)


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16, "topk:0.2"], ids=str)
@pytest.mark.parametrize("sync", ["bsp", "ssp:1", "elastic:3"])
def test_what_does_not_matter_is_held_back_until_it_does(sync, compression):
    if sync != "bsp" and compression is hvd.Compression.fp16:
        return
    gate = paceline.Significance(0.02, decay=0.25)
    options, name = {"learning_rate": 0.1}, f"gated {sync} {compression}."
    trainer, weight, best = lean(
        lambda p: hvd.DistributedTrainer(p, "sgd", options, compression, prefix=name, sync=sync, gate=gate), 120
    )
    trainer.agree()
    assert identical(weight.data())
    np.testing.assert_allclose(weight.data().asnumpy(), best, atol=0.25)


def test_a_gate_withholds_and_adds_up():
    weight = gluon.Parameter("weight", shape=(2000,))
    weight.initialize(mx.init.One())
    gate = paceline.Significance(0.5)
    trainer = hvd.DistributedTrainer([weight], "sgd", {"learning_rate": 1.0}, prefix="adds up.", gate=gate)
    seen = []
    for _ in range(4):  # 0.2, 0.4 and then 0.6 of the weights
        with autograd.record():
            loss = (weight.data() * 0.2 * 8).sum()
        loss.backward()
        trainer.step(8)
        seen.append(round(float(weight.data()[0].asscalar()), 5))
        weight.data()[:] = 1
    assert seen == [1, 1, 0.4, 1]


def test_a_gate_on_pulls():
    gate = paceline.Significance(0.01)
    trainer, weight, best = lean(
        lambda p: hvd.DistributedTrainer(
            p, "sgd", {"learning_rate": 0.1}, sync="ssp:1", gate=gate, pull_gate=gate, prefix="pulls."
        )
    )
    trainer.agree()
    assert identical(weight.data())
    np.testing.assert_allclose(weight.data().asnumpy(), best, atol=0.25)


@pytest.mark.parametrize("gate", [None, paceline.Significance(0.05, decay=0.25)], ids=["no gate", "gate"])
@pytest.mark.parametrize(("sync", "compression"), [("bsp", "topk:0.05"), ("bsp", "none"), ("ssp:0", "none")])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_ended(sync, compression, gate):
    def script():
        weight = gluon.Parameter("weight", shape=(4096,))
        weight.initialize(mx.init.One())
        return weight, hvd.DistributedTrainer(
            [weight],
            "sgd",
            {"learning_rate": 0.125},
            compression,
            prefix=f"resumed {sync} {compression} {gate}.",
            sync=sync,
            gate=gate,
        )

    def go(weight, trainer, start, end):
        for step in range(start, end):
            gradient = mx.nd.array(np.random.default_rng(100 * step + hvd.rank()).integers(-8, 9, 4096) / 16)
            with autograd.record():
                loss = (weight.data() * gradient).sum()
            loss.backward()
            trainer.step(1)
        trainer.agree()
        return weight.data().asnumpy()

    weight, trainer = script()
    kept, state = go(weight, trainer, 0, 5), paceline.compression_state()
    want = go(weight, trainer, 5, 10)
    hvd.allreduce(mx.nd.zeros((1,))).asnumpy()
    weight, trainer = script()
    weight.data()[:] = mx.nd.array(kept)
    paceline.load_compression_state(state)
    assert paceline.compression_state() == state
    np.testing.assert_array_equal(go(weight, trainer, 5, 10), want)


def test_a_checkpoint_has_the_operations_in_flight():
    for _ in range(3):
        x = mx.nd.ones((500, 500)) * (hvd.rank() + 1)
        for _ in range(20):
            x = mx.nd.dot(x, x) / x.sum()
        result = hvd.allreduce(x + mx.nd.arange(500), name="in flight", compression="topk:0.01")
        state = paceline.compression_state()
        result.wait_to_read()
        assert paceline.compression_state() == state
        hvd.allreduce(mx.nd.zeros((1,))).asnumpy()


def of_a_trainer(weight, **options):
    return hvd.DistributedTrainer([weight], "sgd", {"learning_rate": 1.0}, **options)


def of_an_optimizer(weight, **options):
    wrapped = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0), **options)
    return gluon.Trainer([weight], wrapped, kvstore=None)


def training(kind, **options):
    """A parameter of ones, and a function that steps it with a gradient."""
    weight = gluon.Parameter("weight", shape=(4096,))
    weight.initialize(mx.init.One())
    trainer = kind(weight, **options)

    def step(gradient):
        with autograd.record():
            loss = (weight.data() * gradient).sum()
        loss.backward()
        trainer.step(1)
        return weight.data().asnumpy()

    return step


@pytest.mark.parametrize("kind", [of_a_trainer, of_an_optimizer])
def test_what_a_codec_drops_of_one_trainers_gradients_does_not_come_with_anothers(kind):
    """They have the same names: a GAN's two trainers, or those of one training after the other."""
    one, other = training(kind, compression="topk:0.01"), training(kind, compression="topk:0.01")
    for _ in range(3):
        moved = one(mx.nd.arange(4096) / 4096)
        rests = other(mx.nd.zeros((4096,)))
    assert (moved != 1).any() and (rests == 1).all()
    assert (training(kind, compression="topk:0.01")(mx.nd.zeros((4096,))) == 1).all()


@pytest.mark.parametrize("kind", [of_a_trainer, of_an_optimizer])
def test_a_checkpoint_has_what_the_gates_of_several_trainers_hold_back(kind):
    declaring.count_anew()  # as in a new process

    def trainings():
        return [training(kind, gate=paceline.Significance(0.5)) for _ in range(2)]

    for step, gradient in zip(trainings(), (0.2, 0.4), strict=True):
        assert (step(gradient) == 1).all()
    state = paceline.compression_state()
    hvd.allreduce(mx.nd.zeros((1,))).asnumpy()
    paceline.load_compression_state(state)
    one, other = [step(0.2) for step in trainings()]  # 0.4 and 0.6 of the weights together
    assert (one == 1).all()
    np.testing.assert_allclose(other, 0.4, rtol=1e-5)


def test_dgc_says_that_momentum_is_its_own():
    options = {"learning_rate": 0.5, "momentum": 0.9}
    codec = hvd.Compression.dgc(0.1)
    with pytest.warns(UserWarning, match="momentum=0"):
        hvd.DistributedTrainer(network(1).collect_params(), "sgd", options, codec)
    with pytest.warns(UserWarning, match="momentum=0"):
        hvd.DistributedOptimizer(mx.optimizer.SGD(**options), compression=codec)


def test_auto_measures_when_the_trainer_is_made():
    options = {"learning_rate": 0.5, "momentum": 0.9}
    auto = hvd.Compression.auto(candidates=["fp16"])
    alike(*train(lambda p: hvd.DistributedTrainer(p, "sgd", options, auto, prefix="auto.")), tolerance=0.05)


def test_the_timeline_has_the_names_of_the_trainer(tmp_path_factory):
    path = tmp_path_factory.mktemp("timeline") / "trace.json"
    hvd.start_timeline(str(path))
    lean(lambda p: hvd.DistributedTrainer(p, "sgd", {"learning_rate": 0.1}, prefix="seen."), 3)
    lean(lambda p: hvd.DistributedTrainer(p, "sgd", {"learning_rate": 0.1}, prefix="seen.", sync="ssp:1"), 3)
    mx.nd.waitall()
    hvd.stop_timeline()
    own = path if hvd.rank() == 0 else path.with_name(f"trace.{hvd.rank()}.json")
    rows = {e["args"]["name"] for e in json.loads(own.read_text()) if e["name"] == "thread_name"}
    assert any(row.startswith("seen.0") for row in rows) and any(row.startswith("value.seen.0") for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_predivide_factor": 0.0}, "above 0"),
        ({"compression": "nonsense"}, "nonsense"),
        ({"compression": 5}, "compression=5"),
        ({"sync": "nonsense"}, "nonsense"),
        ({"sync": "drop-stragglers:99"}, "99 workers of"),
        ({"sync": "ssp:2", "gradient_predivide_factor": 2.0}, "gradient_predivide_factor=1"),
        ({"sync": "ssp:2", "compression": hvd.Compression.fp16}, "engine's codecs"),
        ({"pull_gate": paceline.Significance(0.1)}, "pull_gate"),
        ({"gate": 0.1}, "Significance"),
        ({"process_set": 5}, "process_set=5: give a ProcessSet"),
    ],
    ids=str,
)
def test_wrong_arguments_are_a_value_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        hvd.DistributedTrainer(network(3).collect_params(), "sgd", **arguments)


def test_an_optimizer_alone_sees_no_iterations():
    with pytest.raises(ValueError, match=r"wraps an mx\.optimizer\.Optimizer, not str"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(ValueError, match="use DistributedTrainer"):
        hvd.DistributedOptimizer(mx.optimizer.SGD(), sync="adaptive:3,3")
