"""DistributedTrainer and DistributedOptimizer: the result is that of one process with the batches of all ranks."""

import copy
import pickle
import warnings

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import paceline.mxnet as hvd


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
