"""The operations of paceline.jax, outside of programs and under jit, grad and vmap."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import paceline.jax as hvd
from paceline.jax import _glue

FLOATS = ["float16", "bfloat16", "float32"]
INTEGERS = ["uint8", "int8", "int16", "int32"]
OPS = {"Sum": np.sum, "Average": np.mean, "Min": np.min, "Max": np.max, "Product": np.prod}
MODES = [lambda f: f, jax.jit]
both = pytest.mark.parametrize("mode", MODES, ids=["at once", "jit"])


def everyones(shape, dtype, high=4):
    """Each rank's array, the same numbers on all ranks: small, so that every type is exact."""
    numbers = np.random.default_rng(7)
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return [numbers.integers(0, high, shape).astype(dtype) for _ in range(hvd.size())]


def same(ours, expected):
    assert np.array_equal(np.asarray(ours, np.float64), np.asarray(expected, np.float64))


@both
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0, 4), (2, 1, 2, 1, 2, 1)], ids=str)
def test_allreduce(mode, dtype, op, shape, rank, size):
    mine = [(a * size).astype(a.dtype) if op == "Average" else a for a in everyones(shape, dtype, high=3)]
    result = mode(lambda x: hvd.allreduce(x, op=getattr(hvd, op)))(mine[rank])
    assert isinstance(result, jax.Array) and result.dtype == mine[0].dtype and result.shape == shape
    same(result, OPS[op](np.stack([np.asarray(m, np.float64) for m in mine]), axis=0))


@both
def test_allreduce_scales_and_compresses(mode, rank):
    mine = everyones((11,), "float32")
    mean = np.stack(mine).mean(0)
    same(mode(lambda x: hvd.allreduce(x, prescale_factor=0.5, postscale_factor=4.0))(mine[rank]), 2 * mean)
    halved = mode(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16))(mine[rank])
    assert halved.dtype == jnp.float32
    same(halved, mean)


@both
def test_allreduce_by_a_codec_of_the_engine(mode, rank, size):
    values = np.linspace(-1, 1, 4096, dtype=np.float32)
    coded = mode(lambda x: hvd.allreduce(x, op=hvd.Sum, name="coded", compression="int8"))(values * (rank + 1))
    total = values * size * (size + 1) / 2
    assert np.abs(coded - total).max() < 0.02 * np.abs(total).max()
    assert not np.array_equal(coded, total)


@both
def test_adasum_of_equal_arrays_is_the_array(mode):
    np.testing.assert_allclose(mode(lambda x: hvd.allreduce(x, op=hvd.Adasum))(jnp.full(8, 3.0)), 3.0, rtol=1e-6)


@both
def test_pytrees_travel_as_one_group(mode, rank, size):
    tree = {"a": jnp.full(3, float(rank)), "b": [jnp.arange(4) + rank, jnp.ones((2, 2), jnp.bfloat16)]}
    result = mode(lambda t: hvd.allreduce(t, op=hvd.Sum, name="tree"))(tree)
    same(result["a"], np.full(3, size * (size - 1) / 2))
    same(result["b"][0], np.arange(4) * size + size * (size - 1) / 2)
    assert result["b"][1].dtype == jnp.bfloat16
    listed = mode(lambda t: hvd.grouped_allreduce(t, op=hvd.Max))([tree["a"], tree["b"][0]])
    assert isinstance(listed, list)
    same(listed[0], np.full(3, size - 1))


@both
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool", "uint16", "uint32"])
def test_allgather_and_broadcast_of_every_type(mode, dtype, rank, size):
    mine = everyones((2, 3), dtype, high=2)
    gathered = mode(hvd.allgather)(mine[rank])
    assert gathered.dtype == mine[0].dtype
    same(gathered, np.concatenate(mine))
    for root in range(size):
        sent = mode(lambda x, root=root: hvd.broadcast(x, root))(mine[rank])
        assert sent.dtype == mine[0].dtype
        same(sent, mine[root])


def test_64_bit_types(x64, size):
    for dtype in ("float64", "int64", "uint64"):
        mine = np.arange(5, dtype=dtype) + np.asarray(1 << 40, dtype)
        assert hvd.broadcast(mine, 0).dtype == dtype
        same(jax.jit(lambda x: hvd.broadcast(x, 0))(mine), mine)
    total = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(np.float64(1) / 3)
    assert total.dtype == np.float64 and abs(float(total) - size / 3) < 1e-15


def test_allgather_of_unequal_rows(rank, size):
    rows = hvd.allgather(jnp.full((rank, 2), rank))  # rank 0 has none
    same(rows, np.concatenate([np.full((r, 2), r) for r in range(size)]))


@pytest.mark.parametrize("handler", [True, False], ids=["handler", "callback"])
def test_unequal_rows_within_a_program_are_an_error_that_says_so(handler, rank, monkeypatch):
    """Which is no loss."""
    if not handler:
        monkeypatch.setattr(_glue, "has_handler", lambda: False)
    with pytest.raises(
        Exception, match=r"under jit every rank gives as many rows|[Ii]ncorrect output shape"
    ) as failure:
        jax.jit(lambda x: hvd.allgather(x))(jnp.ones((1 + rank, 2))).block_until_ready()
    assert "HorovodInternalError" not in str(failure.value)
    same(hvd.allreduce(jnp.ones(2)), np.ones(2))


@both
def test_alltoall_in_equal_parts(mode, rank, size):
    mine = [np.arange(2 * size) + 100 * r for r in range(size)]
    same(mode(hvd.alltoall)(mine[rank]), np.concatenate([m[2 * rank : 2 * rank + 2] for m in mine]))


def test_alltoall_with_splits(rank, size):
    def split(sender):
        return [(sender + receiver) % 3 for receiver in range(size)]

    mine = [np.arange(sum(split(r)) + 1.0) + 100 * r for r in range(size)]  # the last row stays at home
    received, rows = hvd.alltoall(mine[rank], splits=split(rank))
    assert rows.tolist() == [split(r)[rank] for r in range(size)]
    same(received, np.concatenate([np.split(m, np.cumsum(split(r)))[rank] for r, m in enumerate(mine)]))
    with pytest.raises(ValueError, match="how many rows come is known only when it runs"):
        jax.jit(lambda x: hvd.alltoall(x, splits=split(rank)))(mine[rank])


@both
@pytest.mark.parametrize("rows", [0, 1, 7, 8])
def test_reducescatter(mode, rows, rank, size):
    mine = everyones((rows, 3), "float32")
    share, over = divmod(rows, size)
    expected = np.split(np.stack(mine).sum(0), np.cumsum([share + (r < over) for r in range(size)]))[rank]
    same(mode(lambda x: hvd.reducescatter(x, op=hvd.Sum))(mine[rank]), expected)
    same(mode(lambda x: hvd.grouped_reducescatter([x, x], op=hvd.Sum))(mine[rank])[1], expected)


# Gradients, as Horovod defines them


def gradient(mode, function, x):
    """Of sum(w * function(x)), where each rank has other weights w."""

    def loss(x):
        out = function(x)
        return (out * (jnp.arange(out.size, dtype=out.dtype).reshape(out.shape) + hvd.rank())).sum()

    return mode(jax.grad(loss))(x)


@both
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_gradient_of_allreduce_is_reduced_alike(mode, op, rank, size):
    ours = gradient(mode, lambda x: hvd.allreduce(x, op=getattr(hvd, op)), jnp.ones(3))
    total = np.stack([np.arange(3.0) + r for r in range(size)]).sum(0)
    same(ours, total if op == "Sum" else total / size)


@both
def test_gradient_of_allgather_is_averaged_and_cut(mode, rank, size):
    ours = gradient(mode, hvd.allgather, jnp.ones(2))
    same(ours, np.arange(2 * size)[2 * rank : 2 * rank + 2] + (size - 1) / 2)


def test_gradient_of_allgather_of_unequal_rows(rank, size):
    ours = gradient(MODES[0], hvd.allgather, jnp.ones(rank + 1))
    begin = rank * (rank + 1) // 2
    same(ours, np.arange(begin, begin + rank + 1) + (size - 1) / 2)


def test_gradient_of_allgather_of_unequal_rows_where_only_backward_is_traced(rank, size):
    begin, total = rank * (rank + 1) // 2, size * (size + 1) // 2
    _, backward = jax.vjp(hvd.allgather, jnp.ones(rank + 1))
    (ours,) = jax.jit(backward)(jnp.arange(total, dtype=jnp.float32))
    same(ours, np.arange(begin, begin + rank + 1))
    same(jax.jacrev(hvd.allgather)(jnp.ones(rank + 1)), np.eye(total)[:, begin : begin + rank + 1])


@both
def test_gradient_of_broadcast_is_the_roots(mode, rank, size):
    ours = gradient(mode, lambda x: hvd.broadcast(x, 1), jnp.ones(3))
    same(ours, np.arange(3) + (size - 1) / 2 if rank == 1 else np.zeros(3))


@both
def test_gradient_of_alltoall_is_sent_back(mode, rank, size):
    ours = gradient(mode, hvd.alltoall, jnp.ones(size))
    same(ours, [rank + r for r in range(size)])


def test_gradient_of_alltoall_with_splits(rank, size):
    ours = gradient(MODES[0], lambda x: hvd.alltoall(x, splits=[1] * size)[0], jnp.ones(size + 2))
    same(ours, [rank + r for r in range(size)] + [0, 0])


@both
@pytest.mark.parametrize("rows", [4, 5])
def test_gradient_of_reducescatter_is_gathered(mode, rows, rank, size):
    ours = gradient(mode, lambda x: hvd.reducescatter(x, op=hvd.Sum), jnp.ones(rows))
    shares = [rows // size + (r < rows % size) for r in range(size)]
    same(ours, size * np.concatenate([np.arange(n) + r for r, n in enumerate(shares)]))


def test_gradients_of_integers_beside_numbers(rank, size):
    def loss(x):
        out = hvd.allreduce({"x": x, "n": jnp.arange(3)}, op=hvd.Sum)
        return (out["x"] * out["n"]).sum()

    same(jax.jit(jax.grad(loss))(jnp.ones(3)), np.arange(3) * size * size)


# vmap


@both
def test_vmap_maps_as_a_loop_would(mode, rank, size):
    x = jnp.arange(24.0).reshape(2, 3, 4) + 100 * rank
    for function in (
        lambda a: hvd.allreduce(a, op=hvd.Sum),
        lambda a: hvd.broadcast(a, 1),
        hvd.allgather,
        lambda a: hvd.reducescatter(a, op=hvd.Max),
    ):
        expected = jnp.stack([function(a) for a in jnp.moveaxis(x, 1, 0)], axis=1)
        same(mode(jax.vmap(function, in_axes=1, out_axes=1))(x), expected)
    square = jnp.arange(6.0 * size).reshape(3, 2 * size) + 100 * rank
    same(mode(jax.vmap(hvd.alltoall))(square), jnp.stack([hvd.alltoall(a) for a in square]))
    ours = mode(jax.vmap(jax.grad(lambda a: (hvd.allreduce(a, op=hvd.Sum) ** 2).sum())))(square)
    assert ours.shape == square.shape


def test_vmap_of_adasum_says_why_not():
    with pytest.raises(NotImplementedError, match="looks at whole tensors"):
        jax.vmap(lambda a: hvd.allreduce(a, op=hvd.Adasum))(jnp.ones((2, 3)))


# The rest


def test_objects(rank, size):
    assert hvd.broadcast_object({"rank": rank, "f": [1, 2]}, root_rank=1) == {"rank": 1, "f": [1, 2]}
    assert hvd.allgather_object("x" * rank) == ["x" * r for r in range(size)]


def test_broadcast_parameters(rank, size):
    params = {"w": jnp.full((3, 2), float(rank)), "key": jax.random.PRNGKey(rank), "step": jnp.asarray(rank)}
    common = hvd.broadcast_parameters(params, root_rank=size - 1)
    same(common["w"], np.full((3, 2), size - 1))
    same(common["key"], jax.random.PRNGKey(size - 1))
    assert hvd.broadcast_parameters({}) == {}


def test_process_sets(rank, size):
    evens = hvd.add_process_set(range(0, size, 2))
    if rank % 2 == 0:
        for mode in MODES:
            same(mode(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=evens))(1.0), (size + 1) // 2)
            same(mode(lambda x: hvd.allgather(x, process_set=evens))(np.array([rank])), range(0, size, 2))
            ours = gradient(mode, lambda x: hvd.allgather(x, process_set=evens), jnp.ones(1))
            same(ours, [rank // 2 + np.mean(range(0, size, 2))])
        with pytest.raises(NotImplementedError, match="Adasum"):
            hvd.allreduce(1.0, op=hvd.Adasum, process_set=evens)
    for mode in MODES:
        same(mode(lambda x: hvd.allreduce(x, op=hvd.Sum))(1.0), size)
    hvd.remove_process_set(evens)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(1.0, process_set=evens)


def test_the_device_stays(rank):
    x = jax.device_put(jnp.ones(3), jax.devices()[0])
    assert hvd.allreduce(x).devices() == x.devices()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hvd.allreduce(np.ones(2, np.complex64)), "complex64 cannot be reduced"),
        (lambda: hvd.allreduce(np.ones(2, np.uint32)), "uint32 cannot be reduced"),
        (lambda: hvd.allreduce(np.array([True])), "bool cannot be reduced"),
        (lambda: hvd.broadcast(np.ones(2, ml_dtypes.float8_e5m2), 0), "float8_e5m2 cannot be sent"),
        (lambda: hvd.allreduce(np.array([2**40])), "do not fit int32, which JAX makes of int64: set jax_enable_x64"),
        (lambda: hvd.broadcast(np.uint64(2**32), 0), "do not fit uint32"),
        (lambda: jax.jit(lambda: hvd.allreduce(np.array([-(2**40)])))(), "do not fit int32"),
        (lambda: hvd.allreduce(2**40), "does not fit JAX's integers: .*; set jax_enable_x64"),
        (lambda: hvd.allreduce("text"), "takes arrays, not str"),
        (lambda: hvd.allreduce([]), "at least one array"),
        (lambda: hvd.allreduce(1.0, op=17), "no reduction operator"),
        (lambda: hvd.allreduce(1.0, name="a\0b"), "NUL"),
        (lambda: jax.jit(lambda x: hvd.allreduce(x, name="a\0b"))(1.0), "NUL"),
        (lambda: hvd.allreduce(1.0, compression="nonsense"), "nonsense"),
        (lambda: hvd.allgather(1.0), "works on rows"),
        (lambda: hvd.reducescatter(1.0), "works on rows"),
        (lambda: hvd.alltoall(np.ones(3), splits=[0.5]), "splits must be integers"),
        (lambda: hvd.alltoall(np.ones(2 * hvd.size() + 1)), "give splits"),
        (lambda: hvd.broadcast(1.0, 99), "99"),
        (lambda: hvd.allreduce(1.0, process_set=5), "process_set=5: give a ProcessSet"),
        (lambda: hvd.allreduce(1.0, process_set=None), "process_set=None: give a ProcessSet"),
        (lambda: hvd.broadcast(1.0, 0, process_set=5), "process_set=5: give a ProcessSet"),
        (lambda: hvd.allreduce(1.0, name=3), "name=3: a name is a string"),
    ],
)
def test_wrong_arguments_are_a_value_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_ranks_that_disagree_get_an_error_and_go_on(rank, size):
    with pytest.raises(hvd.HorovodInternalError, match="ranks disagree about"):
        hvd.allreduce(jnp.ones(2 + rank), name="different")
    with pytest.raises(Exception, match=r'ranks disagree about "different\.jit'):
        jax.block_until_ready(jax.jit(lambda x: hvd.allreduce(x, name="different.jit"))(jnp.ones(2 + rank)))
    long = "n" * 4090  # the message has more than a program's error holds
    with pytest.raises(Exception, match=r"HorovodInternalError: ranks disagree about \"nnn"):
        jax.block_until_ready(jax.jit(lambda x: hvd.allreduce(x, name=long))(jnp.ones(2 + rank)))
    same(hvd.allreduce(2.0), 2.0)
    same(jax.jit(hvd.allreduce)(2.0), 2.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: hvd.broadcast(x, root_rank=hvd.size()), "root"),
        (lambda x: hvd.allreduce(x, compression="nonsense"), "nonsense"),
    ],
)
def test_wrong_arguments_within_a_program_are_no_loss(call, message):
    """After a HorovodInternalError elastic training would go back to its last commit and do the same again."""
    with pytest.raises(Exception, match=message) as failure:
        jax.block_until_ready(jax.jit(call)(jnp.ones(3)))
    assert "HorovodInternalError" not in str(failure.value)


def test_join(rank, size):
    if rank == 0:
        last = hvd.join()
    else:
        same(hvd.allreduce(jnp.ones(2), op=hvd.Sum, name="joined"), np.full(2, size - 1))
        last = hvd.join()
    assert last in range(size)
    assert hvd.allgather_object(last) == [last] * size
