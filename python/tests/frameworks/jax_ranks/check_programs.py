"""Operations within programs: their order, their effects, and loops, branches and inner programs."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paceline.jax as hvd
from paceline.common.engine import engine

MANY = 12


def work(x, rounds):
    """Computing that takes as long as it is told to, and its result 0."""
    return jax.lax.fori_loop(0, rounds, lambda i, c: jnp.sin(c) * 1.0000001, x) * 0


def test_every_rank_starts_in_the_order_of_the_program(rank, size):
    """Though inputs become ready in another order on each rank, and the operations have no names."""

    @jax.jit
    def program(inputs, rounds):
        return [hvd.allreduce(work(x, n) + i, op=hvd.Sum) for i, (x, n) in enumerate(zip(inputs, rounds, strict=True))]

    inputs = [jnp.ones(20000) for _ in range(MANY)]
    for _ in range(3):
        results = program(inputs, [jnp.int32(200 if i % size == rank else 1) for i in range(MANY)])
        for i, result in enumerate(results):
            assert np.array_equal(result, np.full(20000, size * i))


def test_programs_start_one_after_the_other(rank, size):
    started = [jax.jit(lambda x, i=i: hvd.allreduce(work(x, 100) + i, op=hvd.Sum))(jnp.ones(5000)) for i in range(6)]
    last = hvd.allreduce(jnp.float32(rank), op=hvd.Sum)  # outside, while they run
    for i, result in enumerate(started):
        assert np.array_equal(result, np.full(5000, size * i))
    assert last == size * (size - 1) / 2


def test_what_nobody_uses_is_exchanged_nevertheless(rank):
    @jax.jit
    def program(x):
        if rank == 0:
            return x + hvd.allreduce(x, op=hvd.Sum) * 0
        hvd.allreduce(x, op=hvd.Sum)
        return x

    assert program(jnp.float32(3)) == 3
    hvd.barrier()


def test_equal_operations_are_not_merged(tmp_path_factory, rank, size):
    path = tmp_path_factory.mktemp("timeline") / "trace.json"
    hvd.start_timeline(str(path))

    @jax.jit
    def program(x):
        return hvd.allreduce(x, name="twice.a") + hvd.allreduce(x, name="twice.a")

    assert program(jnp.float32(1)) == 2
    hvd.stop_timeline()
    own = path if rank == 0 else path.with_name(f"trace.{rank}.json")
    events = json.loads(own.read_text())
    (row,) = {e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"].startswith("twice.a")}
    assert len([e for e in events if e.get("tid") == row and e["name"] == "allreduce"]) == 2


def test_an_inner_program_that_is_called_twice(size, rank):
    inner = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    slow, fast = jax.jit(lambda x: (inner(work(x, 200) + 1), inner(x * 0 + 2)))(jnp.ones(5000))
    assert slow[0] == size and fast[0] == 2 * size


def test_loops_and_branches(rank, size):
    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda i, c: hvd.allreduce(c) + 1, x))
    assert np.allclose(looped(jnp.float32(rank)), (size - 1) / 2 + 20)
    scanned = jax.jit(lambda x: jax.lax.scan(lambda c, t: (hvd.allreduce(c + t), c), x, jnp.arange(10.0)))
    assert np.allclose(scanned(jnp.float32(0))[0], 45)
    assert jax.jit(jax.grad(lambda x: scanned(x)[0]))(1.0) == 1
    branch = jax.jit(lambda x, k: jax.lax.cond(k > 0, lambda: hvd.allreduce(x, op=hvd.Sum), lambda: x))
    assert branch(jnp.float32(1), 1) == size and branch(jnp.float32(1), 0) == 1


def test_a_loop_of_operations_after_an_operation(size):
    """What an operation's end continues may wait for the next operation."""

    @jax.jit
    def program(x):
        y = hvd.allreduce(x)
        return jax.lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, hvd.allreduce(s[1]) + 1), (0, y))[1]

    assert np.array_equal(program(jnp.ones(20000)), np.full(20000, 6))


def test_checkpointed_functions(size):
    ours = jax.jit(jax.grad(jax.checkpoint(lambda x: (hvd.allreduce(jnp.sin(x), op=hvd.Sum) ** 2).sum())))(jnp.ones(2))
    assert np.allclose(ours, 2 * size * size * np.sin(1) * np.cos(1))


def test_a_barrier_within_a_program(rank):
    @jax.jit
    def program(x):
        hvd.barrier()
        return x + 1

    assert program(1) == 2


def test_forward_mode_is_an_error():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(hvd.allreduce, (1.0,), (1.0,))


def test_64_mib(size):
    result = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(jnp.ones(16 << 20))
    assert np.array_equal(result, np.full(16 << 20, size))


def test_many_programs(size):
    program = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    for i in range(300):
        assert program(jnp.float32(i)) == size * i


def test_programs_of_an_earlier_job_go_on_or_are_refused(rank, size):
    """Those that are kept as they were lowered: jitted functions are compiled anew."""
    x = jnp.ones(1)
    program, gathering, at_the_root = (
        jax.jit(f).lower(x)
        for f in (
            lambda x: hvd.allreduce(x, op=hvd.Sum),
            lambda x: hvd.allgather(x),
            jax.grad(lambda x: hvd.broadcast(x, 0)[0]),
        )
    )
    assert program.compile()(x) == size
    assert gathering.compile()(x).shape == (size,)
    assert at_the_root.compile()(x) == (rank == 0)
    for _ in range(3):
        hvd.shutdown()
        with pytest.raises(Exception, match=r"not (been )?initialized"):
            jax.block_until_ready(program.compile()(x))
        with pytest.raises(ValueError, match="not been initialized"):
            hvd.allreduce(1.0)
        hvd.init(process_sets="dynamic")
        assert program.compile()(x) == size
        for refused in (gathering, at_the_root):
            with pytest.raises(Exception, match="compiled for an earlier job"):
                jax.block_until_ready(refused.compile()(x))


def test_a_jitted_function_is_compiled_anew_in_the_next_job(size):
    gathering = jax.jit(hvd.allgather)
    for _ in range(2):
        assert gathering(jnp.ones(1)).shape == (size,)
        assert jax.jit(hvd.allgather)(jnp.ones(1)).shape == (size,)
        hvd.shutdown()
        hvd.init(process_sets="dynamic")


@jax.jit
def sent_by_rank_0(x):
    return hvd.broadcast(x, 0)


def test_what_was_traced_in_an_earlier_job_is_no_part_of_a_new_program(rank, size, monkeypatch):
    """Here the ranks are numbered in the other direction afterwards."""
    assert jax.jit(jax.grad(lambda x: sent_by_rank_0(x)))(1.0) == (rank == 0)
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    monkeypatch.setattr(engine, "rank", lambda: size - 1 - rank)
    assert jax.jit(jax.grad(lambda x: sent_by_rank_0(x)))(1.0) == (rank == size - 1)


@pytest.mark.skipif(not hasattr(sent_by_rank_0, "trace"), reason="this JAX lowers what it traces at once")
def test_what_was_traced_in_an_earlier_job_and_kept_is_refused():
    kept = jax.jit(jax.grad(sent_by_rank_0)).trace(1.0)
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    with pytest.raises(Exception, match="compiled for an earlier job"):
        jax.block_until_ready(kept.lower().compile()(1.0))


def test_a_state_is_saved_when_it_is_computed(rank, size):
    """A loss that comes before leaves what was saved before."""
    program = jax.jit(lambda x: hvd.allreduce(x @ x, op=hvd.Sum))
    state = hvd.elastic.JaxState(x=jnp.ones((300, 300)))
    x = program(state.x)
    time.sleep(0.5 * rank)
    state.x = program(x)
    state.save()
    assert state._saved_state["x"].is_ready()


def test_a_training_that_ends_waits_for_its_programs(rank, size):
    """A loss that shows in one of them would not be mended otherwise."""
    program = jax.jit(lambda x: hvd.allreduce(x @ x, op=hvd.Sum))

    @hvd.elastic.run
    def train(state):
        state.x = program(jnp.ones((300 + rank, 300 + rank)))

    with pytest.raises(hvd.HorovodInternalError, match="ranks disagree"):
        train(hvd.elastic.JaxState(x=jnp.ones(1)))
    assert program(jnp.ones((300, 300)))[0, 0] == 300 * size
