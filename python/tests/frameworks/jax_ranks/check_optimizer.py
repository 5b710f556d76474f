"""distributed_optimizer: real training, equal to one process with all ranks' batches."""

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


def test_predivided_gradients(rank, size):
    plain, divided = (
        train(hvd.distributed_optimizer(optax.sgd(0.1), gradient_predivide_factor=f), new_parameters(), rank, size)[0]
        for f in (1.0, 2.0)
    )
    assert differences(plain, divided) < 1e-5


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


def test_a_codecs_state_goes_into_a_checkpoint(rank, size):
    state = paceline.compression_state()
    hvd.barrier()
    paceline.load_compression_state(state)
    hvd.barrier()


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


def test_ssp_0_equals_one_process(rank, size, x64):
    """Each rank's step of plain SGD is linear, so that the mean of the ranks' steps is the step of the mean."""
    optimizer = hvd.distributed_optimizer(optax.sgd(0.1), sync="ssp:0")
    ours, _ = train(optimizer, new_parameters(), rank, size)
    assert differences(optimizer.agree(ours), alone(optax.sgd(0.1), size)) < 1e-9


def test_gates_where_the_servers_hold_the_parameters(rank, size):
    gate = paceline.Significance(0.01)
    optimizer = hvd.distributed_optimizer(optax.sgd(0.5), sync="ssp:1", gate=gate, pull_gate=gate)
    ours, _ = train(optimizer, new_parameters(dtype=np.float32), rank, size)
    assert_identical(optimizer.agree(ours))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"gradient_predivide_factor": 0.0}, "above 0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "op=hvd.Average only"),
        ({"op": hvd.Adasum}, "Adasum"),
        ({"op": 77}, "no reduction operator"),
        ({"compression": "nonsense"}, "nonsense"),
        ({"compression": "auto"}, "auto"),
        ({"sync": "nonsense"}, "nonsense"),
        ({"sync": "adaptive:3,3"}, "a jitted program does not see"),
        ({"sync": "ssp:2", "op": hvd.Max}, "op=Average or Sum"),
        ({"pull_gate": paceline.Significance(0.1)}, "pull_gate"),
        ({"gate": 0.1}, "Significance"),
    ],
    ids=str,
)
def test_wrong_arguments_are_a_value_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        hvd.distributed_optimizer(optax.sgd(0.1), **arguments)
