"""Parameters that differ between ranks are an error after the first steps, and every PACELINE_CHECK_PARAMETERS-th."""

import warnings

import pytest
import torch
from torch import nn

import paceline
import paceline.torch as hvd

EVERY = 4


@pytest.fixture(scope="module", autouse=True)
def often():
    hvd.shutdown()
    hvd.init(process_sets="dynamic", settings={"check_parameters": EVERY})
    yield
    hvd.shutdown()
    hvd.init(process_sets="dynamic")


class Training:
    """A model that all ranks have alike, unless `seed` differs."""

    def __init__(self, name, seed=1, lr=0.01, **options):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(80, 60), nn.Linear(60, 20))
        self.name = name
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=lr),
            [(f"{name} {n}", p) for n, p in self.model.named_parameters()],
            **options,
        )
        self.passes = options.get("backward_passes_per_step", 1)

    def step(self, times=1):
        for _ in range(times):
            self.optimizer.zero_grad()
            for _ in range(self.passes):
                self.model(torch.ones(3, 80) * (hvd.rank() + 1) / 10).square().mean().backward()
            self.optimizer.step()

    def differs(self, pattern):
        return pytest.raises(RuntimeError, match=rf"(?s)'{self.name} {pattern}.*broadcast_parameters")


ALIKE = {
    "plain": {},
    "fp16": {"compression": hvd.Compression.fp16},
    "codec": {"compression": "topk:0.1"},
    "gate": {"gate": paceline.Significance(0.1)},
    "groups": {"groups": 1},
    "passes": {"backward_passes_per_step": 2},
    "Adasum": {"op": hvd.Adasum},
    "drop-stragglers": {"sync": "drop-stragglers:1"},
    "SSP": {"sync": "ssp:3"},
    "cached": {"sync": paceline.SSP(3, cached=True)},
    "wait-free": {"sync": "ssp:3", "wait_free": True},
    "adaptive": {"sync": "adaptive:2,2"},
    "elastic": {"sync": "elastic:3"},
}


@pytest.mark.parametrize("kind", ALIKE)
def test_what_ranks_may_do_is_no_error(kind):
    training = Training(f"alike {kind}", **ALIKE[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.step(3 * EVERY)
    training.optimizer.agree()
    hvd.barrier()


@pytest.mark.parametrize("kind", ["plain", "fp16", "codec", "gate", "groups", "passes", "Adasum"])
def test_a_forgotten_broadcast_shows_in_the_first_steps(kind, rank, size):
    if size == 1:
        return
    training = Training(f"forgotten {kind}", seed=1 + (rank == size - 1), **ALIKE[kind])
    training.step()
    with training.differs(
        rf"0\.weight' \(and 3 more\) of rank {size - 1} differs from that of ranks? 0.*by [0-9.]+ of its norm"
    ):
        training.step()
    hvd.broadcast_parameters(training.model.state_dict(), 0)
    training.step(2 * EVERY)  # what the second step has started is compared by then
    hvd.barrier()


def test_a_rank_that_goes_astray_later_is_found_at_the_next_check(rank, size):
    if size == 1:
        return
    training = Training("astray")
    training.step(EVERY)
    if rank == 0:
        with torch.no_grad():
            training.model[1].bias[3] += 0.01
    training.step(EVERY)
    with training.differs(r"1\.bias' of rank"):
        training.step()
    hvd.barrier()


def test_another_learning_rate_on_one_rank_is_found(rank, size):
    if size == 1:
        return
    training = Training("rate", lr=0.01 * (1 + rank))
    training.step()
    with training.differs(r"0\.weight'"):
        training.step()
    hvd.barrier()


def test_rounding_is_a_warning(rank, size):
    if size == 1:
        return
    training = Training("rounding")
    training.step(2)
    if rank == 1:
        with torch.no_grad():
            weight = training.model[0].weight
            weight.view(-1)[:50] = torch.nextafter(weight.view(-1)[:50], torch.tensor(9.0))
    with pytest.warns(UserWarning, match=r"'rounding 0\.weight' of rank.*rounding of different processors"):
        training.step(EVERY)
    training.step(2 * EVERY)
    hvd.barrier()


def test_each_process_set_has_its_own(rank, size):
    if size < 4:
        return
    pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    training = Training("pair", seed=1 + (rank == 3), process_set=pairs[rank // 2])
    training.step()
    if rank < 2:
        training.step(2 * EVERY)
    else:
        with training.differs(r"0\.weight' \(and 3 more\) of rank 3 differs from that of rank 2"):
            training.step()
    hvd.barrier()
    for pair in pairs:
        hvd.remove_process_set(pair)


def test_ranks_with_unequal_data_join_and_count_from_there(rank, size):
    training = Training("join")
    training.step(5 + 2 * rank)
    last = hvd.join()
    hvd.broadcast_parameters(training.model.state_dict(), last)
    training.step(2 * EVERY)
    hvd.barrier()


def test_two_optimizers_and_one_that_only_one_rank_has(rank):
    unused = Training("unused") if rank == 0 else None
    both = [Training("first"), Training("second")]
    for _ in range(2 * EVERY):
        for training in both:
            training.step()
    assert unused is None or unused.model
    hvd.barrier()


def test_of_many_ranks_parameters_share_hashes(monkeypatch, rank, size):
    if size == 1:
        return
    monkeypatch.setattr("paceline.torch._parameter_check.LARGEST", 5 * size)
    training = Training("shared", seed=1 + rank)
    training.step()
    with pytest.raises(RuntimeError, match=r"one of 'shared 0\.weight' to 'shared 0\.bias' \(and 2 more\)"):
        training.step()
    hvd.barrier()
