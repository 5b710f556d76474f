"""The parts of hvd.elastic alone: how samples are shared, states, and what run() does with them."""

import random
import re
from collections import Counter

import pytest
import torch

import paceline
import paceline.torch as hvd
from paceline.common.elastic import ObjectState, run_fn
from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from paceline.common.sampling import Shares, share
from paceline.common.seat import Seat


def test_shares_are_equal_disjoint_and_cover_what_is_not_processed():
    draw = random.Random(1)
    for _ in range(200):
        length, size, epoch = draw.randrange(60), draw.randrange(1, 9), draw.randrange(5)
        order = Shares(length, True, 7).remaining(epoch, 0)
        assert sorted(order) == list(range(length)) and order == Shares(length, True, 7).remaining(epoch, 0)
        done = draw.randrange(length + 9)
        rest = Shares(length, True, 7).remaining(epoch, done)
        assert rest == order[done:]
        parts = [share(rest, rank, size) for rank in range(size)]
        assert {len(p) for p in parts} == {-(-len(rest) // size)}
        seen = Counter(i for p in parts for i in p)
        assert set(seen) == set(rest)
        assert sum(seen.values()) - len(rest) < size  # no more repeated than it takes
    assert Shares(5, False, 0).remaining(3, 2) == [2, 3, 4]
    assert Shares(50, True, 0).remaining(0, 0) != Shares(50, True, 0).remaining(1, 0)


def test_what_was_processed_before_a_change_is_not_processed_again():
    for before, after in ((2, 3), (4, 1), (3, 5)):
        shares, batch, batches = Shares(100, True, 3), 4, 5
        whole = shares.remaining(0, 0)
        first = [share(whole, rank, before)[: batch * batches] for rank in range(before)]
        rest = shares.remaining(0, batch * batches * before)
        second = [share(rest, rank, after) for rank in range(after)]
        done, later = {i for p in first for i in p}, {i for p in second for i in p}
        assert done | later == set(range(100)) and not done & later


@pytest.fixture
def alone():
    hvd.init()
    yield
    hvd.shutdown()


def test_the_sampler_goes_on_after_what_it_has_recorded(alone):
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    assert list(sampler) == list(range(10)) and len(sampler) == 10
    sampler.record_batch(0, 3)
    assert len(sampler) == 10  # the running epoch keeps its length
    other = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == list(range(3, 10)) and other.remaining_indices == list(range(3, 10))
    other.set_epoch(1)
    assert (other.epoch, len(other), other.total_size) == (1, 10, 10)
    shuffled = hvd.elastic.ElasticSampler(range(10))
    first = list(shuffled)
    shuffled.set_epoch(1)
    assert sorted(first) == list(range(10)) and list(shuffled) != first


def test_restore_goes_back_to_the_commit(alone):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, schedule=schedule, seen=[1], batch=0)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        schedule.step()

    step()
    state.seen.append(2)
    state.batch = 7
    state.commit()
    weight, momentum = model.weight.detach().clone(), [v["momentum_buffer"].clone() for v in optimizer.state.values()]
    for _ in range(2):  # a second restore finds what was saved unchanged
        step()
        state.seen.append(3)
        state.batch = 9
        state.restore()
        assert torch.equal(model.weight, weight) and (state.seen, state.batch) == ([1, 2], 7)
        assert all(
            torch.equal(v["momentum_buffer"], m) for v, m in zip(optimizer.state.values(), momentum, strict=True)
        )
        assert schedule.last_epoch == 1
    other = torch.nn.Linear(2, 2)
    state.model = other
    assert state.model is other
    other.weight.data.zero_()
    state.restore()
    assert other.weight.abs().sum() > 0


def test_restore_clears_gradients_of_the_step_that_was_lost(alone):
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    state.commit()
    model(torch.ones(1, 2)).sum().backward()
    state.restore()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_the_backward_passes_of_a_step_are_counted_anew_among_other_ranks(alone):
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    model(torch.ones(1, 2)).sum().backward()
    hvd.shutdown()
    hvd.init()
    state.on_reset()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_loss_that_shows_in_a_commit_leaves_what_was_committed_before(alone, monkeypatch):
    """With cross_barrier the reductions of the last step end there. A sampler before the model was saved anew."""
    sampler = hvd.elastic.ElasticSampler(range(10))
    state = hvd.elastic.TorchState(model=torch.nn.Linear(2, 1), sampler=sampler, batch=0)
    sampler.record_batch(0, 2)
    state.batch = 1

    def lose():
        raise HorovodInternalError("a rank is lost")

    monkeypatch.setattr(engine, "_before_rest", [lose])
    with pytest.raises(HorovodInternalError, match="a rank is lost"):
        state.commit()
    state.restore()
    assert (state.batch, sampler.processed_num) == (0, 0)


def test_a_process_is_as_new_as_the_state_that_it_has(monkeypatch):
    """One that dies between its place and the state of the others must not be taken for one that has it."""
    asked = []

    def answer(process, ask, timeout):
        asked.append(ask)
        return {"env": {}, "commits": 101}

    monkeypatch.setenv("PACELINE_ELASTIC_PROCESS", "1")
    monkeypatch.setattr(engine, "seat", answer)
    monkeypatch.setattr(engine, "init", lambda *_: None)
    seat = Seat()
    seat._asked, seat.commits = True, 3
    for _ in range(2):
        seat.join([], {"compression": "fp16"})
    seat.synchronised()
    seat.commits += 4
    seat.synchronised()  # before another call of the training function
    seat.join([], None)
    assert [ask["commits"] for ask in asked] == [3, 3, 105]


def test_what_has_no_copy_is_saved_as_others_get_it(alone):
    loss = (torch.ones(2, requires_grad=True) * 2).sum()
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, loss=loss)
    state.commit()
    state.loss = None
    state.restore()
    assert state.loss.item() == 4


def test_handlers_can_be_replaced(alone):
    class Tracked(list):
        pass

    class Handler(hvd.elastic.StateHandler):
        calls = ""

        def save(self):
            self.calls += "s"

        def restore(self):
            self.calls += "r"

        def sync(self):
            self.calls += "y"

    before = hvd.elastic.get_handler_registry()
    hvd.elastic.set_handler_registry([*before, (Tracked, Handler)])
    try:
        state = hvd.elastic.TorchState(tracked=Tracked(), plain=1)
    finally:
        hvd.elastic.set_handler_registry(before)
    state.save()
    state.restore()
    state.sync()
    assert state._handlers["tracked"].calls == "ssry" and state.plain == 1


def test_a_codec_that_ranks_measure_together_is_refused_in_elastic_jobs(alone, monkeypatch):
    monkeypatch.setenv("PACELINE_ELASTIC_PROCESS", "0")
    sgd = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    for sync in (None, paceline.SSP(3)):
        with pytest.raises(ValueError, match="a rank that joins would measure alone; name a codec"):
            hvd.DistributedOptimizer(sgd, compression=hvd.Compression.auto(), sync=sync)


def test_without_an_elastic_launcher_the_error_goes_to_the_caller(alone):
    state = ObjectState(lambda x: x, hvd.rank, x=1)

    def lose(state):
        state.x = 2
        raise HorovodInternalError("lost")

    with pytest.raises(HorovodInternalError, match="lost"):
        run_fn(lose, lambda: None)(state)
    calls = []

    def train(state):
        calls.append(state.x)
        if len(calls) == 1:
            state.x = 5
            raise HostsUpdatedInterrupt()
        return "trained"

    state.register_reset_callbacks([lambda: calls.append("reset")])
    assert run_fn(train, lambda: calls.append("again"))(state) == "trained"
    assert calls == [2, "again", "reset", 5]
    assert re.search("hosts", str(HostsUpdatedInterrupt())) and HostsUpdatedInterrupt(True).skip_sync
