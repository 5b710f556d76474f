"""distributed_optimizer: real training, equal to one process with all ranks' batches."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

import paceline
import paceline.jax as hvd

STEPS, EACH = 12, 16


def digits():
    images, labels = load_digits(return_X_y=True)
    return images / 16, labels


def new_parameters(seed=3, dtype=np.float64):
    numbers = np.random.default_rng(seed)
    return {
        "hidden": {"w": numbers.normal(size=(64, 32)).astype(dtype) / 8, "b": np.zeros(32, dtype)},
        "out": {"w": numbers.normal(size=(32, 10)).astype(dtype) / 6, "b": np.zeros(10, dtype)},
    }


def loss_of(params, images, labels):
    hidden = jax.nn.relu(images @ params["hidden"]["w"] + params["hidden"]["b"])
    logits = hidden @ params["out"]["w"] + params["out"]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(optimizer, params, place, size, mode=jax.jit, steps=STEPS):
    """The parameters after training on one of `size` equal parts of each batch, and the last state."""
    images, labels = digits()
    state = optimizer.init(params)

    def step(params, state, x, y):
        updates, state = optimizer.update(jax.grad(loss_of)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    step = mode(step)
    for i in range(steps):
        own = slice((i * size + place) * EACH, (i * size + place + 1) * EACH)
        params, state = step(params, state, images[own].astype(params["out"]["b"].dtype), labels[own])
    return params, state


def alone(optimizer, size, steps=STEPS, dtype=np.float64):
    """The same in one process, with all ranks' images in one batch."""
    images, labels = digits()
    params = new_parameters(dtype=dtype)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, x, y):
        updates, state = optimizer.update(jax.grad(loss_of)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        whole = slice(i * size * EACH, (i + 1) * size * EACH)
        params, state = step(params, state, images[whole].astype(dtype), labels[whole])
    return params


def differences(ours, theirs):
    pairs = zip(jax.tree_util.tree_leaves(ours), jax.tree_util.tree_leaves(theirs), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def assert_identical(params):
    bits = [np.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(params)]
    assert all(other == bits for other in hvd.allgather_object(bits))


@pytest.mark.parametrize("make", [lambda: optax.sgd(0.1, momentum=0.9), lambda: optax.adam(1e-2)], ids=["sgd", "adam"])
@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["at once", "jit"])
def test_training_equals_one_process_with_all_batches(make, mode, rank, size, x64):
    params = hvd.broadcast_parameters(new_parameters(seed=3 + rank))
    ours, _ = train(hvd.distributed_optimizer(make()), params, rank, size, mode)
    assert_identical(ours)
    assert differences(ours, alone(make(), size)) < 1e-12


def test_training_in_float32(rank, size):
    ours, _ = train(hvd.distributed_optimizer(optax.sgd(0.1)), new_parameters(dtype=np.float32), rank, size)
    assert_identical(ours)
    assert differences(ours, alone(optax.sgd(0.1), size, dtype=np.float32)) < 1e-5


def test_backward_passes_per_step_add_gradients_up(rank, size, x64):
    optimizer = hvd.distributed_optimizer(optax.sgd(0.05), backward_passes_per_step=3)
    params = new_parameters()
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    grads = jax.tree_util.tree_map(lambda p: np.ones_like(p) * (rank + 1), params)
    for passed in range(1, 7):
        updates, state = update(grads, state, params)
        expected = -0.05 * 3 * (size + 1) / 2 if passed % 3 == 0 else 0
        assert np.allclose(updates["out"]["w"], expected)


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_backward_passes_under_vmap_are_counted_once_for_all(mode, rank, size):
    """Where each has a number of its own, JAX would run the exchange in every pass."""
    optimizer = hvd.distributed_optimizer(optax.sgd(1.0), backward_passes_per_step=2, name=f"vmap {mode.__name__}.")
    params = {"w": jnp.ones((3, 5))}
    grads = {"w": jnp.arange(15.0).reshape(3, 5) * (rank + 1)}
    states = jax.vmap(optimizer.init)(params)
    for update in mode(jax.vmap(optimizer.update)), jax.vmap(jax.jit(optimizer.update)):
        with pytest.raises(NotImplementedError, match="vmap of an optimizer with backward_passes_per_step"):
            update(grads, states, params)
    axes = states._replace(inner=0, passes=None, accumulated=0)
    state = states._replace(passes=jnp.int32(0))
    update = mode(jax.vmap(optimizer.update, in_axes=(0, axes, 0), out_axes=(0, axes)))
    for expected in (0, -(size + 1)):
        updates, state = update(grads, state, params)
        assert np.allclose(updates["w"], expected * np.arange(15.0).reshape(3, 5))


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("sync", ["bsp", "ssp:0"])
def test_backward_passes_of_gradients_of_another_type_than_the_parameters(sync, mode, rank, size):
    name = f"of another type {mode.__name__}."
    optimizer = hvd.distributed_optimizer(optax.sgd(1.0), backward_passes_per_step=2, sync=sync, name=name)
    params = {"w": jnp.ones(3)}
    state = optimizer.init(params)
    update = mode(optimizer.update)
    for expected in (0, -(size + 1)):
        updates, state = update({"w": jnp.full(3, rank + 1, jnp.bfloat16)}, state, params)
        assert updates["w"].dtype == jnp.float32
        assert np.allclose(updates["w"], expected)


def test_predivided_gradients(rank, size):
    plain, divided = (
        train(hvd.distributed_optimizer(optax.sgd(0.1), gradient_predivide_factor=f), new_parameters(), rank, size)[0]
        for f in (1.0, 2.0)
    )
    assert differences(plain, divided) < 1e-5


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_ranks_outside_of_the_process_set_step_alone(mode, rank, size):
    some = hvd.add_process_set([0])
    for gate in None, paceline.Significance(0.0):
        optimizer = hvd.distributed_optimizer(optax.sgd(1.0), process_set=some, gate=gate, name="some")
        params = {"w": jnp.zeros(3)}
        updates, _ = mode(optimizer.update)({"w": jnp.full(3, rank + 1.0)}, optimizer.init(params), params)
        assert np.allclose(updates["w"], -(rank + 1.0))
    hvd.remove_process_set(some)


@pytest.mark.parametrize("sync", ["ssp:1", paceline.SSP(1, cached=True), paceline.DynamicPSSP(1)], ids=str)
def test_ranks_outside_of_the_process_set_step_alone_where_servers_hold_the_parameters(sync, rank):
    some = hvd.add_process_set([0])
    for gate in None, paceline.Significance(0.0):
        optimizer = hvd.distributed_optimizer(optax.sgd(1.0), process_set=some, gate=gate, sync=sync, name=f"{gate}.")
        params = {"w": jnp.full(3, rank + 1.0)}
        state = optimizer.init(params)
        updates, _ = optimizer.update({"w": jnp.full(3, rank + 1.0)}, state, params)
        ours = optimizer.agree(optax.apply_updates(params, updates))
        assert np.allclose(ours["w"], 0)
    hvd.remove_process_set(some)


def test_within_a_chain(rank, size, x64):
    chain = optax.chain(hvd.distributed_optimizer(optax.identity()), optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    ours, _ = train(chain, new_parameters(), rank, size)
    theirs = alone(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), size)
    assert differences(ours, theirs) < 1e-12


@pytest.mark.parametrize("compression", ["int8", hvd.Compression.topk(0.1), hvd.Compression.fp16], ids=str)
def test_codecs(compression, rank, size):
    """Ranks hold the same bits, and the loss comes down."""
    optimizer = hvd.distributed_optimizer(optax.sgd(0.5), compression=compression, name=f"{compression}.")
    start = new_parameters(dtype=np.float32)
    ours, _ = train(optimizer, start, rank, size)
    assert_identical(ours)
    images, labels = digits()
    assert loss_of(ours, images, labels) < 0.9 * loss_of(start, images, labels)


@pytest.mark.parametrize("gate", [None, paceline.Significance(0.05, decay=0.25)], ids=["no gate", "gate"])
@pytest.mark.parametrize(("sync", "compression"), [("bsp", "topk:0.05"), ("bsp", "none"), ("ssp:0", "none")])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_ended(sync, compression, gate, rank):
    """Parameters, the optimizer's state, which has what a gate withholds, and the codecs' are what is needed."""
    name = f"resumed {sync} {compression} {gate}."

    def go(optimizer, params, state, start, end):
        for step in range(start, end):
            grads = np.random.default_rng(100 * step + rank).integers(-8, 9, 4096).astype(np.float32) / 16
            updates, state = optimizer.update({"w": grads}, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    def made():
        return hvd.distributed_optimizer(optax.sgd(0.125), compression, sync=sync, gate=gate, name=name)

    params = {"w": jnp.ones(4096)}
    whole = made()
    middle, state = go(whole, params, whole.init(params), 0, 5)
    middle = whole.agree(middle)
    kept = paceline.compression_state()
    want = whole.agree(go(whole, middle, state, 5, 10)[0])
    hvd.barrier()
    resumed = made()
    fresh = resumed.init(middle)
    paceline.load_compression_state(kept)
    assert paceline.compression_state() == kept
    assert jax.tree_util.tree_structure(fresh) == jax.tree_util.tree_structure(state)
    ours = resumed.agree(go(resumed, middle, state, 5, 10)[0])
    assert np.array_equal(ours["w"], want["w"])
    hvd.barrier()


def test_a_checkpoint_has_the_steps_in_flight():
    optimizer = hvd.distributed_optimizer(optax.sgd(1.0), compression="topk:0.01", name="in flight.")
    params = {"w": jnp.ones(4096)}
    state = optimizer.init(params)

    @jax.jit
    def step(state, x):
        computed = jax.lax.fori_loop(0, 2000, lambda _, c: jnp.sin(c) * 1.0000001, x)
        return optimizer.update({"w": computed}, state, params)

    for _ in range(3):
        updates, state = step(state, jnp.arange(4096.0))
        kept = paceline.compression_state()
        jax.block_until_ready(updates)
        assert paceline.compression_state() == kept
        hvd.barrier()


def test_auto_measures_in_init(rank, size):
    auto = hvd.Compression.auto(candidates=["fp16"])
    optimizer = hvd.distributed_optimizer(optax.sgd(0.1), compression=auto, name="auto.")
    ours, _ = train(optimizer, new_parameters(dtype=np.float32), rank, size)
    assert_identical(ours)
    assert differences(ours, alone(optax.sgd(0.1), size, dtype=np.float32)) < 1e-2


def test_the_timeline_has_the_names_of_parameters(tmp_path_factory, rank, size):
    path = tmp_path_factory.mktemp("timeline") / "trace.json"
    hvd.start_timeline(str(path))
    train(hvd.distributed_optimizer(optax.sgd(0.1), name="seen."), new_parameters(), rank, size)
    train(hvd.distributed_optimizer(optax.sgd(0.1), name="seen.", sync="ssp:1"), new_parameters(), rank, size)
    hvd.barrier()
    hvd.stop_timeline()
    own = path if rank == 0 else path.with_name(f"trace.{rank}.json")
    rows = {e["args"]["name"] for e in json.loads(own.read_text()) if e["name"] == "thread_name"}
    assert any(row.startswith("allreduce.seen.hidden.w") for row in rows), rows
    assert any(row.startswith("value") and "seen.hidden.w" in row for row in rows), rows


def test_a_gate_withholds_and_adds_up(rank, size):
    optimizer = hvd.distributed_optimizer(optax.sgd(1.0), gate=paceline.Significance(0.5), name="gate.")
    params = {"w": jnp.full(2000, 1.0), "v": jnp.full(2000, 1.0)}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    grads = {"w": jnp.full(2000, 0.2), "v": jnp.full(2000, 2.0)}
    seen = []
    for _ in range(4):  # 0.2, 0.4 and then 0.6 of the weights
        updates, state = update(grads, state, params)
        assert np.allclose(updates["v"], -2)
        seen.append(float(updates["w"][0]))
    assert np.allclose(seen, [0, 0, -0.6, 0]) and np.allclose(state.withheld["w"], 0.2)
    with pytest.raises(ValueError, match="needs the parameters"):
        optimizer.update(grads, state)


@pytest.mark.parametrize("sync", ["ssp:2", paceline.ASP(), "bsp", "dsps"], ids=str)
def test_synchronisation_models(sync, rank, size):
    optimizer = hvd.distributed_optimizer(optax.sgd(0.5), sync=sync)
    start = hvd.broadcast_parameters(new_parameters(seed=rank, dtype=np.float32))
    ours, _ = train(optimizer, start, rank, size)
    common = optimizer.agree(ours)
    assert_identical(common)
    images, labels = digits()
    assert loss_of(common, images, labels) < 0.9 * loss_of(start, images, labels)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    "sync", ["adaptive:3,3", "elastic:5", paceline.SSP(2, cached=True), paceline.DynamicPSSP(2)], ids=str
)
def test_models_that_decide_between_iterations_outside_of_programs(sync, passes, rank, size):
    """Only the gradients are jitted."""
    optimizer = hvd.distributed_optimizer(optax.sgd(0.25 / passes), sync=sync, backward_passes_per_step=passes)
    start = hvd.broadcast_parameters(new_parameters(seed=rank, dtype=np.float32))
    images, labels = digits()
    params, state = start, optimizer.init(start)
    gradient = jax.jit(jax.grad(loss_of))
    for i in range(2 * STEPS + 1):
        own = slice((i * size + rank) * EACH, (i * size + rank + 1) * EACH)
        updates, state = optimizer.update(gradient(params, images[own].astype(np.float32), labels[own]), state, params)
        params = optax.apply_updates(params, updates)
    common = optimizer.agree(params)
    assert_identical(common)
    assert loss_of(common, images, labels) < 0.9 * loss_of(start, images, labels)
    with pytest.raises(ValueError, match="a jitted program does not see"):
        jax.jit(optimizer.update)(params, state, params)


def test_ranks_agree_after_different_numbers_of_steps_that_are_kept(rank, size):
    """Rank 0's fourth step is an exchange, for which it waits until the others agree."""
    optimizer = hvd.distributed_optimizer(optax.sgd(1.0), sync=paceline.SSP(1, cached=True), name="uneven kept.")
    params = {"w": jnp.zeros(3)}
    state = optimizer.init(params)
    for _ in range(4 if rank == 0 else 3):
        updates, state = optimizer.update({"w": jnp.full(3, -1.0)}, state, params)
        params = optax.apply_updates(params, updates)
    ours = optimizer.agree(params)
    assert_identical(ours)
    assert np.allclose(ours["w"], (3 * size + 1) / size)


def test_ssp_0_equals_one_process(rank, size, x64):
    """Each rank's step of plain SGD is linear, so that the mean of the ranks' steps is the step of the mean."""
    optimizer = hvd.distributed_optimizer(optax.sgd(0.1), sync="ssp:0")
    ours, _ = train(optimizer, new_parameters(), rank, size)
    assert differences(optimizer.agree(ours), alone(optax.sgd(0.1), size)) < 1e-9


def test_a_jitted_init_declares_the_parameters_of_the_last_to_join(rank, size):
    """Though it was compiled before the join."""
    optimizer = hvd.distributed_optimizer(optax.sgd(1.0), sync="ssp:1", name="joined.")
    init, params = jax.jit(optimizer.init), {"w": jnp.full(3, rank + 1.0)}
    init(params)
    assert np.array_equal(optimizer.agree(params)["w"], np.ones(3))
    if rank == size - 1:
        assert hvd.allreduce(1.0, op=hvd.Sum) == 1  # the others have joined
    assert hvd.join() == size - 1
    init(params)
    assert np.array_equal(optimizer.agree(params)["w"], np.full(3, size))


def test_a_second_init_says_how_to_begin_anew_where_servers_hold_the_parameters():
    params = {"w": jnp.ones(3)}
    for _ in range(2):
        optimizer = hvd.distributed_optimizer(optax.sgd(1.0), sync="ssp:1", name="again.")
        jax.eval_shape(optimizer.init, params)
        optimizer.init(params)
        with pytest.raises(ValueError, match=r"make another with hvd\.distributed_optimizer"):
            optimizer.init(params)
        assert np.array_equal(optimizer.agree(params)["w"], np.ones(3))


@pytest.mark.parametrize("gate", [paceline.Significance(0.01), paceline.Significance(0.0, decay=0.5)], ids=str)
def test_gates_where_the_servers_hold_the_parameters(gate, rank, size):
    optimizer = hvd.distributed_optimizer(optax.sgd(0.5), sync="ssp:1", gate=gate, pull_gate=gate, name=f"{gate}.")
    ours, _ = train(optimizer, new_parameters(dtype=np.float32), rank, size)
    assert_identical(optimizer.agree(ours))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"backward_passes_per_step": 1.5}, "at least 1"),
        ({"process_set": 5}, "process_set=5: give a ProcessSet"),
        ({"process_set": None, "sync": "ssp:2"}, "process_set=None: give a ProcessSet"),
        ({"gradient_predivide_factor": 0.0}, "above 0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "op=hvd.Average only"),
        ({"op": hvd.Adasum}, "Adasum"),
        ({"op": 77}, "no reduction operator"),
        ({"compression": "nonsense"}, "nonsense"),
        ({"sync": "nonsense"}, "nonsense"),
        ({"sync": "ssp:2", "op": hvd.Max}, "op=Average or Sum"),
        ({"pull_gate": paceline.Significance(0.1)}, "pull_gate"),
        ({"gate": 0.1}, "Significance"),
    ],
    ids=str,
)
def test_wrong_arguments_are_a_value_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        hvd.distributed_optimizer(optax.sgd(0.1), **arguments)


def test_what_is_no_optimizer_is_a_value_error():
    with pytest.raises(ValueError, match="wraps an optimizer of optax, not float"):
        hvd.distributed_optimizer(0.1)
