"""Worker-cached SSP (the modular parameter server's listing 4.4): one exchange in s + 1 iterations, sums kept."""

import pytest
import torch

import paceline
import paceline.torch as hvd


class Counter:
    """A parameter whose steps are whole numbers: each of rank r's adds r + 1, so that sums are exact."""

    def __init__(self, name, s, wait_free, **options):
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([self.weight], lr=1.0),
            [(f"cached {name} {wait_free}", self.weight)],
            op=hvd.Sum,
            sync=paceline.SSP(s, cached=True),
            wait_free=wait_free,
            **options,
        )

    def step(self, times=1):
        for _ in range(times):
            self.optimizer.zero_grad()
            (self.weight * -(hvd.rank() + 1.0)).sum().backward()
            self.optimizer.step()

    @property
    def value(self):
        assert (self.weight == self.weight[0]).all()
        return self.weight[0].item()


def pushes():
    hvd.barrier()
    return int(hvd.allreduce(torch.tensor(paceline.tally()["admitted"]), op=hvd.Sum))


@pytest.fixture(params=[False, True], ids=["in step", "wait-free"])
def wait_free(request):
    return request.param


@pytest.fixture
def everyone(size):
    return size * (size + 1) / 2  # what all ranks add in an iteration


def test_five_iterations_alone_and_the_sum_of_six_with_the_sixth(wait_free, rank, size, everyone):
    counter, before = Counter("six", 5, wait_free), pushes()
    for window in range(10):
        for alone in range(1, 6):
            counter.step()
            assert counter.value == 6 * window * everyone + alone * (rank + 1)
        counter.step()
        assert counter.value == 6 * (window + 1) * everyone
    if size > 1:
        assert 10 * size <= pushes() - before <= 15 * size  # counting itself pushes too


def test_a_rank_waits_with_its_sixth_iteration_for_the_others_first_six(wait_free, rank, size, everyone):
    """So no rank leads by more than s = 5 iterations."""
    counter = Counter("waits", 5, wait_free)
    counter.step()  # declares
    if rank == 0:
        counter.step(4)  # needs nobody
        hvd.barrier()
    else:
        hvd.barrier()
        counter.step(4)
    counter.step()
    assert counter.value == 6 * everyone
    hvd.barrier()


def test_agree_sends_what_is_kept(wait_free, size, everyone):
    counter = Counter("flush", 5, wait_free)
    counter.step(9)
    counter.optimizer.agree()
    assert counter.value == 9 * everyone
    counter.step(6)
    assert counter.value == 15 * everyone
    counter.optimizer.agree()
    counter.optimizer.agree()
    assert counter.value == 15 * everyone


def test_ranks_with_unequal_iterations_are_level_again_after_agree(wait_free, rank, size, everyone):
    counter = Counter("unequal", 2, wait_free)
    counter.step(4 + (rank > 0) * 4)  # one exchange and two: rank 0's next is in agree
    counter.optimizer.agree()
    first = 4 * everyone + 4 * (everyone - 1)
    assert counter.value == first
    counter.step(6)
    assert counter.value == first + 6 * everyone
    hvd.barrier()


def test_a_gate_decides_on_the_kept_sum(wait_free, rank, size, everyone):
    counter = Counter("gate", 1, wait_free, gate=paceline.Significance(0.0))
    counter.step(4)
    assert counter.value == 4 * everyone
    hvd.barrier()


def test_a_join_forgets_what_is_kept_and_the_age(wait_free, rank, size, everyone):
    counter = Counter("join", 3, wait_free)
    counter.step(6)
    last = hvd.join()
    before = hvd.broadcast(counter.weight.detach(), last)[0].item() if size > 1 else counter.value
    counter.step(4)
    assert counter.value == before + 4 * everyone
    hvd.barrier()
