"""Fixtures of the checks that every rank runs."""

import pytest
import torch

import paceline.torch as hvd


@pytest.fixture(scope="session", autouse=True)
def job():
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1234)  # the same on every rank, so that each can compute the others' tensors


@pytest.fixture
def rank():
    return hvd.rank()


@pytest.fixture
def size():
    return hvd.size()
