"""Fixtures of the checks that every rank runs."""

import pytest
import tensorflow as tf

import paceline.tensorflow as hvd

tf.config.threading.set_inter_op_parallelism_threads(2)


@pytest.fixture(scope="session", autouse=True)
def job():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture(autouse=True)
def seed():
    tf.keras.utils.set_random_seed(1234)  # the same on every rank, so that each can compute the others' tensors


@pytest.fixture
def rank():
    return hvd.rank()


@pytest.fixture
def size():
    return hvd.size()


@pytest.fixture(params=["eager", "graph"])
def run(request):
    """Runs a function of no arguments eagerly, or in tf.function."""
    return (lambda f: f()) if request.param == "eager" else (lambda f: tf.function(f)())
