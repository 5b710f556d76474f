"""Fixtures of the checks that every rank runs."""

import jax
import pytest

import paceline.jax as hvd


@pytest.fixture(scope="session", autouse=True)
def job():
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


@pytest.fixture
def rank():
    return hvd.rank()


@pytest.fixture
def size():
    return hvd.size()


@pytest.fixture
def x64():
    """JAX with 64-bit types."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
