"""Every operation with its gradient, eagerly and in tf.function."""

import numpy as np
import pytest
import tensorflow as tf

import paceline.keras as hvd_keras
import paceline.tensorflow as hvd

TYPES = [tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64]
MOVED = [tf.bool, tf.uint16, tf.uint32, tf.uint64, tf.complex64, tf.complex128]


def mine(rank, shape=(5, 3), dtype=tf.float32):
    """The tensor of a rank."""
    return tf.cast(tf.reshape(tf.range(np.prod(shape)), shape) + 10 * (rank + 1), dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name)
def test_allreduce_sums_every_type(run, rank, size, dtype):
    result = run(lambda: hvd.allreduce(mine(rank, (2, 3), dtype), op=hvd.Sum))
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, tf.add_n([mine(r, (2, 3), dtype) for r in range(size)]))


@pytest.mark.parametrize("dtype", MOVED, ids=lambda t: t.name)
def test_what_cannot_be_reduced_can_be_moved(run, rank, size, dtype):
    x = mine(rank, (rank + 1, 3), dtype)
    everyone = np.concatenate([mine(r, (r + 1, 3), dtype) for r in range(size)])
    np.testing.assert_array_equal(run(lambda: hvd.allgather(x)), everyone)
    np.testing.assert_array_equal(run(lambda: hvd.broadcast(mine(rank, dtype=dtype), 1)), mine(1, dtype=dtype))
    assert run(lambda: hvd.broadcast(tf.cast(rank, dtype), 1)).numpy() == tf.cast(1, dtype).numpy()
    result, received = run(lambda: hvd.alltoall(x, [rank + 1] + [0] * (size - 1)))
    np.testing.assert_array_equal(result, everyone if rank == 0 else everyone[:0])
    assert result.dtype == dtype and received.numpy().tolist() == [r + 1 if rank == 0 else 0 for r in range(size)]
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{dtype.name} .*(not defined|reduced)"):
        run(lambda: hvd.allreduce(mine(rank, dtype=dtype)))


def test_operators_and_factors(run, rank, size):
    every = np.stack([mine(r) for r in range(size)])
    for op, want in [
        (hvd.Average, every.mean(0)),
        (hvd.Min, every.min(0)),
        (hvd.Max, every.max(0)),
        (hvd.Product, every.prod(0)),
    ]:
        np.testing.assert_allclose(run(lambda: hvd.allreduce(mine(rank), op=op)), want, rtol=1e-6)
    scaled = run(lambda: hvd.allreduce(mine(rank), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0))
    np.testing.assert_allclose(scaled, every.sum(0) * 1.5, rtol=1e-6)
    assert hvd.allreduce(tf.zeros([0, 4])).shape == (0, 4) and hvd.allreduce(tf.constant(3.0)).shape == ()


def test_groups_of_several_types(run, rank, size):
    tensors = [mine(rank, (3,), tf.float64), mine(rank, (2, 2), tf.int32)]
    for result, tensor in zip(run(lambda: hvd.grouped_allreduce(tensors, op=hvd.Sum)), tensors, strict=True):
        want = tf.add_n([mine(r, tensor.shape, tensor.dtype) for r in range(size)])
        np.testing.assert_array_equal(result, want)


def test_a_codec_adds_what_it_drops_to_the_next_tensor_of_a_name_alone(run, rank, size):
    """A place in a graph is that of any tensors, which are exact, as eager ones without a name are."""
    topk, x = hvd.Compression.topk(0.01), mine(rank, (4096,))
    total = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, compression=topk))
    np.testing.assert_array_equal(total(x), tf.add_n([mine(r, (4096,)) for r in range(size)]))
    assert not tf.math.count_nonzero(total(tf.zeros_like(x)))
    run(lambda: hvd.allreduce(x, op=hvd.Sum, compression=topk, name="of one name"))
    rest = run(lambda: hvd.allreduce(tf.zeros_like(x), op=hvd.Sum, compression=topk, name="of one name"))
    assert tf.math.count_nonzero(rest)


def test_allreduce_gradient_is_reduced_alike(run, rank, size):
    x = mine(rank)

    def gradient():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.allreduce(x, op=hvd.Sum) * float(rank + 1)
        return tape.gradient(y, x)

    np.testing.assert_allclose(run(gradient), np.full((5, 3), sum(r + 1 for r in range(size))))


def test_allgather_and_its_gradient(run, rank, size):
    x = mine(rank, (rank + 2, 3))

    def both():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.allgather(x)
            loss = tf.reduce_sum(y * tf.reshape(tf.range(tf.size(y), dtype=tf.float32), tf.shape(y)) * (rank + 1.0))
        return y, tape.gradient(loss, x)

    y, grad = run(both)
    np.testing.assert_array_equal(y, np.concatenate([mine(r, (r + 2, 3)) for r in range(size)]))
    rows = sum(r + 2 for r in range(size))
    every = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) * np.mean([r + 1 for r in range(size)])
    start = sum(r + 2 for r in range(rank))
    np.testing.assert_allclose(grad, every[start : start + rank + 2], rtol=1e-6)
    empty = run(lambda: hvd.allgather(tf.zeros([0, 2])))
    assert empty.shape == (0, 2)


def test_shapes_are_known_in_graphs(rank, size):
    @tf.function
    def shapes():
        x = tf.zeros([7, 3])
        gathered, scattered, (part, counts) = hvd.allgather(x), hvd.reducescatter(x), hvd.alltoall(x, [0] * size)
        assert gathered.shape.as_list() == [None, 3] and part.shape.as_list() == [None, 3]
        assert scattered.shape.as_list() == [7 // size + (rank < 7 % size), 3] and counts.shape.as_list() == [size]
        return gathered, scattered, part

    assert [t.shape[0] for t in shapes()] == [7 * size, 7 // size + (rank < 7 % size), 0]


def test_broadcast_and_its_gradient(run, rank, size):
    x = mine(rank)

    def both():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.broadcast(x, root_rank=1)
            loss = y * float(rank + 1)
        return y, tape.gradient(loss, x)

    y, grad = run(both)
    np.testing.assert_array_equal(y, mine(1))
    want = np.mean([r + 1 for r in range(size)]) if rank == 1 else 0.0
    np.testing.assert_allclose(grad, np.full((5, 3), want))


def test_alltoall_and_its_gradient(run, rank, size):
    splits = [rank + r for r in range(size)]
    x = mine(rank, (sum(splits) + 1, 2))

    def both():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, received = hvd.alltoall(x, splits)
            loss = y * float(rank + 1)
        return y, received, tape.gradient(loss, x)

    y, received, grad = run(both)
    want = []
    for r in range(size):
        before = sum(r + k for k in range(rank))
        want.append(mine(r, (sum(r + k for k in range(size)) + 1, 2))[before : before + r + rank])
    np.testing.assert_array_equal(y, np.concatenate(want))
    assert received.numpy().tolist() == [r + rank for r in range(size)] and received.dtype == tf.int32
    sent = np.concatenate([np.full((n, 2), r + 1.0) for r, n in enumerate(splits)] + [np.zeros((1, 2))])
    np.testing.assert_allclose(grad, sent)
    assert run(lambda: hvd.alltoall(tf.zeros([2 * size, 3]))).shape == (2 * size, 3)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_reducescatter_and_its_gradient(run, rank, size, op):
    x = mine(rank)

    def both():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.reducescatter(x, op=op)
            loss = y * float(rank + 1)
        return y, tape.gradient(loss, x)

    y, grad = run(both)
    counts = [5 // size + (r < 5 % size) for r in range(size)]
    every = np.stack([mine(r) for r in range(size)])
    every = every.sum(0) if op == hvd.Sum else every.mean(0)
    np.testing.assert_allclose(y, every[sum(counts[:rank]) :][: counts[rank]], rtol=1e-6)
    factor = size if op == hvd.Sum else 1
    np.testing.assert_allclose(
        grad, np.concatenate([np.full((n, 3), factor * (r + 1.0)) for r, n in enumerate(counts)])
    )


def test_indexed_slices_are_gathered(run, rank, size):
    slices = tf.IndexedSlices(
        tf.fill([2, 3], float(rank)), tf.constant([rank, 5], tf.int64), tf.constant([6, 3], tf.int64)
    )

    def dense():
        return tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Average))

    want = np.zeros((6, 3))
    for r in range(size):
        want[[r, 5]] += r / size
    np.testing.assert_allclose(run(dense), want, rtol=1e-6)


def test_a_group_may_have_indexed_slices(run, rank, size):
    slices = tf.IndexedSlices(tf.fill([1, 2], rank + 1.0), tf.constant([rank]), tf.constant([size, 2]))

    def reduced():
        group = [tf.fill([3], float(rank)), slices, tf.ones([2])]
        return [tf.convert_to_tensor(r) for r in hvd.grouped_allreduce(group, op=hvd.Sum)]

    first, rows, last = run(reduced)
    assert first.numpy().tolist() == [sum(range(size))] * 3 and last.numpy().tolist() == [size] * 2
    assert rows.numpy().tolist() == [[r + 1] * 2 for r in range(size)]


def test_indexed_slices_of_integers_are_cut_towards_zero(run, rank, size):
    mine = [-2 * size - 1, 2**60 + size]
    slices = tf.IndexedSlices(tf.constant(mine), tf.constant([rank, rank]), tf.constant([size]))
    for op, want in (hvd.Average, [-2, 2**60 // size]), (hvd.Sum, mine):
        result = run(lambda op=op: hvd.allreduce(slices, op=op).values)
        assert result.dtype == tf.int64 and result.numpy().tolist() == want * size


REFUSING = [hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter, hvd_keras.allreduce, hvd_keras.allgather]


@pytest.mark.parametrize("operation", REFUSING)
def test_ragged_and_sparse_tensors_are_refused(run, operation):
    for tensor in tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.sparse.from_dense([[1.0, 0.0]]):
        with pytest.raises(TypeError, match=f"{type(tensor).__name__} cannot be exchanged.*to_dense"):
            run(lambda tensor=tensor: operation(tensor))
    with pytest.raises(TypeError, match="RaggedTensor cannot be exchanged"):
        run(lambda: hvd.broadcast(tf.ragged.constant([[1.0], []]), root_rank=0))


def test_process_sets(run, rank, size):
    evens = hvd.add_process_set(range(0, size, 2))
    try:
        if evens.included():
            result = run(lambda: hvd.allreduce(mine(rank), op=hvd.Sum, process_set=evens))
            np.testing.assert_array_equal(result, tf.add_n([mine(r) for r in range(0, size, 2)]))
        assert hvd.size_op(evens.process_set_id).numpy() == len(range(0, size, 2))
        assert bool(hvd.process_set_included_op(evens.process_set_id).numpy()) == (rank % 2 == 0)
    finally:
        hvd.remove_process_set(evens)
    assert (hvd.rank_op().numpy(), hvd.size_op().numpy()) == (rank, size)


def test_operations_of_a_process_set_leave_those_of_all_ranks_alone(run, rank, size):
    evens = hvd.add_process_set(range(0, size, 2))
    variables = [tf.Variable([1.0]), tf.Variable([2.0])]

    def sums():
        x = mine(rank)
        for name in (None, "named", None):
            if evens.included():
                x = hvd.allreduce(x, op=hvd.Sum, name=name, process_set=evens)
            x = hvd.allreduce(x, op=hvd.Sum, name=name)
        return x

    def gradient(variable, process_set):
        with tf.GradientTape() as tape:
            loss = variable * variable
        return hvd.DistributedGradientTape(tape, process_set=process_set).gradient(loss, variable)

    def gradients():
        own = gradient(variables[0], evens) if evens.included() else tf.constant([2.0])
        return own, gradient(variables[1], hvd.global_process_set)

    want = [mine(r).numpy() for r in range(size)]
    for _ in range(3):
        of_evens = sum(want[::2])
        want = [sum(of_evens if r % 2 == 0 else want[r] for r in range(size))] * size
    try:
        np.testing.assert_allclose(run(sums), want[rank], rtol=1e-6)
        for _ in range(2):
            assert [float(g[0]) for g in run(gradients)] == [2.0, 4.0]
    finally:
        hvd.remove_process_set(evens)


def test_ranks_that_run_operations_in_other_orders_do_not_block(rank, size):
    """More operations than TensorFlow has threads, each after a different delay on each rank."""

    @tf.function
    def many():
        x = tf.random.stateless_uniform([400, 400], [1, 2])
        inputs = []
        for i in range(24):
            slow = i if rank % 2 else 24 - i
            y = x
            for _ in range(slow // 6):
                y = tf.matmul(y, x) / 400.0
            inputs.append(tf.reduce_sum(y) * 0.0 + float(i + rank))
        return [hvd.allreduce(v, op=hvd.Sum, name=f"order.{i}") for i, v in enumerate(inputs)]

    for _ in range(3):
        results = [float(v) for v in many()]
        assert results == [float(sum(i + r for r in range(size))) for i in range(24)]


def test_operations_in_graphs_match_after_one_rank_has_traced_more(rank, size):
    @tf.function(reduce_retracing=False)
    def total(x):
        return hvd.allreduce(tf.reduce_sum(x), op=hvd.Sum) + hvd.allreduce(tf.reduce_max(x), op=hvd.Sum)

    if rank == 0:
        total.get_concrete_function(tf.TensorSpec([17], tf.float32))
    for n in (3, 4) if rank else (3, 3):
        assert total(tf.ones([n])).numpy() >= size


def test_one_name_may_be_used_twice_in_a_function(rank, size):
    """And on either branch of a tf.cond: ranks that take different ones meet under it."""

    @tf.function
    def both(x, y, first):
        two = hvd.allreduce(x, name="of two", op=hvd.Sum), hvd.allreduce(y, name="of two", op=hvd.Sum)
        branch = tf.cond(
            first,
            lambda: hvd.allreduce(x, name="of a branch", op=hvd.Sum),
            lambda: hvd.allreduce(2 * x, name="of a branch", op=hvd.Sum),
        )
        return *two, branch

    for _ in range(3):
        x, y, branch = both(tf.ones(3), tf.ones(3) * 2, tf.constant(rank == 0))
        assert (x[0], y[0], branch[0]) == (size, 2 * size, 2 * size - 1)


def test_codecs(run, rank, size):
    x = tf.random.stateless_normal([4096], [1, rank])
    every = np.mean([tf.random.stateless_normal([4096], [1, r]) for r in range(size)], axis=0)
    for compression, tolerance in [(hvd.Compression.fp16, 3e-3), (hvd.Compression.bf16(), 0.03), ("int8", 0.1)]:
        result = run(lambda: hvd.allreduce(x, compression=compression, name="codec"))
        np.testing.assert_allclose(result, every, atol=tolerance)
        assert result.dtype == tf.float32
    topk = run(lambda: hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.topk(0.25, feedback=False)))
    assert 0 < np.count_nonzero(topk) < 4096


def test_objects(rank, size):
    assert hvd.broadcast_object({"rank": rank, "text": "a" * 1000}, root_rank=1) == {"rank": 1, "text": "a" * 1000}
    assert hvd.allgather_object(list(range(rank))) == [list(range(r)) for r in range(size)]
    assert hvd.broadcast_object_fn(root_rank=1)(rank) == 1


def test_join_and_barrier(rank, size):
    hvd.barrier()
    if rank:
        assert hvd.allreduce(tf.ones([2]), op=hvd.Sum).numpy().tolist() == [size - 1.0] * 2
    assert hvd.join() in range(size)
    with pytest.raises(RuntimeError, match="eagerly"):
        tf.function(hvd.barrier)()


def test_broadcast_variables(rank):
    variables = [tf.Variable(mine(rank)), tf.Variable(mine(rank, (2,), tf.int64)), tf.Variable(rank == 1)]
    hvd.broadcast_variables(variables, root_rank=1)
    np.testing.assert_array_equal(variables[0], mine(1))
    assert variables[1].numpy().tolist() == mine(1, (2,)).numpy().tolist() and bool(variables[2])
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


def test_a_graph_of_tensorflow_1(rank, size):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=tf.fill([3], float(rank)))
        total = hvd.allreduce(variable, op=hvd.Sum)
        broadcast = hvd.broadcast_global_variables(1)
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(total).tolist() == [float(sum(range(size)))] * 3
        session.run(broadcast)
        assert session.run(variable).tolist() == [1.0] * 3


def test_what_ranks_disagree_about_is_an_error_that_names_it(rank):
    with pytest.raises(hvd.HorovodInternalError, match="disagree"):
        hvd.allreduce(tf.zeros([2 + rank]), name="disagree")
    with pytest.raises(tf.errors.UnknownError, match="disagree"):
        tf.function(lambda: hvd.allreduce(tf.zeros([2 + rank]), name="disagree too"))()
    with pytest.raises(hvd.HorovodInternalError, match="disagree about"):  # as much of it as there is room for
        hvd.allreduce(tf.zeros([2 + rank]), name="n" * 4000)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="0-dimensional"):
        hvd.allgather(tf.constant(1.0))
    with pytest.raises(ValueError, match="auto"):
        hvd.allreduce(tf.ones([2]), compression="auto")
    with pytest.raises(ValueError, match="no reduction operator"):
        hvd.allreduce(tf.ones([2]), op=17)
    with pytest.raises(tf.errors.InvalidArgumentError, match="cast it first"):
        hvd.allreduce(tf.constant([1 + 2j]))
    with pytest.raises(ValueError, match="integers"):
        hvd.alltoall(tf.ones([2]), [0.5, 1.5])
    for nobody in (5, None):
        for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
            with pytest.raises(ValueError, match=f"process_set={nobody}: give a ProcessSet"):
                call(tf.ones([2]), process_set=nobody)
        with pytest.raises(ValueError, match=f"process_set={nobody}: give a ProcessSet"):
            hvd.broadcast(tf.ones([2]), 0, process_set=nobody)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="process set 99 is not registered"):
        hvd.size_op(99)
