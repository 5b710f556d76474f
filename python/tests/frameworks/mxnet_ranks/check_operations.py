"""The operations of paceline.mxnet, in any order on the ranks, with what fails."""

import mxnet as mx
import numpy as np
import pytest

import paceline
import paceline.mxnet as hvd

DTYPES = ["uint8", "int8", "int32", "int64", "float16", "float32", "float64"]


@pytest.fixture(scope="module", autouse=True)
def job():
    hvd.init()
    yield
    mx.nd.waitall()


def mine(shape=(3, 4), dtype="float32", of=None):
    rank = hvd.rank() if of is None else of
    return mx.nd.array(np.arange(np.prod(shape)).reshape(shape) + rank, dtype=dtype)


def same(array, expected):
    np.testing.assert_allclose(array.asnumpy().astype("float64"), np.asarray(expected, "float64"), rtol=1e-3)


def all_ranks(shape=(3, 4), dtype="float32"):
    return [mine(shape, dtype, r).asnumpy().astype("float64") for r in range(hvd.size())]


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_of_all_types(dtype):
    every = all_ranks(dtype=dtype)
    for op, expected in (
        (hvd.Sum, sum(every)),
        (hvd.Min, np.minimum.reduce(every)),
        (hvd.Max, np.maximum.reduce(every)),
    ):
        array = mine(dtype=dtype)
        result = hvd.allreduce(array, op=op, name=f"all types {dtype} {op}")
        assert result.dtype == array.dtype
        same(result, expected)
        same(array, every[hvd.rank()])  # is as it was


def test_in_place_and_grouped_and_scaled():
    array = mine()
    assert hvd.allreduce_(array, name="in place") is array
    same(array, sum(all_ranks()) / hvd.size())
    results = hvd.grouped_allreduce([mine((n,)) for n in (1, 5, 7)], name="grouped", op=hvd.Sum, prescale_factor=2.0)
    for n, result in zip((1, 5, 7), results, strict=True):
        same(result, 2 * sum(all_ranks((n,))))
    arrays = [mine((2,)), mine((6,))]
    hvd.grouped_allreduce_(arrays, op=hvd.Sum)
    for n, array in zip((2, 6), arrays, strict=True):
        same(array, sum(all_ranks((n,))))


def test_results_follow_what_they_depend_on():
    """Nothing waits in between: MXNet's engine orders what is computed before and after."""
    array = mx.nd.ones((1000,)) * (hvd.rank() + 1)
    total = hvd.size() * (hvd.size() + 1) / 2
    for _ in range(50):
        array = array * 2
        hvd.allreduce_(array, op=hvd.Sum, name="chain")
        array = array / (2 * total) * (hvd.rank() + 1)
    same(array, np.full(1000, hvd.rank() + 1))


def test_ranks_may_push_named_operations_in_any_order():
    names = [f"any order {i}" for i in range(40)]
    order = names if hvd.rank() % 2 == 0 else names[::-1]
    results = {name: hvd.allreduce(mx.nd.full((50,), names.index(name)), name=name) for name in order}
    for i, name in enumerate(names):
        same(results[name], np.full(50, i))


def test_more_unnamed_operations_in_flight_than_names():
    arrays = [mx.nd.full((20,), i) for i in range(200)]
    for array in arrays:
        hvd.allreduce_(array)
    for i, array in enumerate(arrays):
        same(array, np.full(20, i))


def test_a_codec_adds_what_it_drops_to_the_next_array_of_a_name_alone():
    """Arrays without a name take turns with so many labels, and are exact."""
    x, zeros = mine((4096,)), mx.nd.zeros((4096,))
    for _ in range(100):
        same(hvd.allreduce(x, op=hvd.Sum, compression="topk:0.01"), sum(all_ranks((4096,))))
    for _ in range(100):
        assert not hvd.allreduce(zeros, op=hvd.Sum, compression="topk:0.01").asnumpy().any()
    hvd.allreduce(x, op=hvd.Sum, compression="topk:0.01", name="of one name")
    assert hvd.allreduce(zeros, op=hvd.Sum, compression="topk:0.01", name="of one name").asnumpy().any()


def test_views_of_one_array():
    array = mx.nd.zeros((6, 3))
    hvd.grouped_allreduce_([array[0:2] + 1, array[2:4]], op=hvd.Sum)
    rows = array[4:6]
    rows[:] = hvd.rank()
    hvd.allreduce_(rows, op=hvd.Sum)
    same(array[4:6], np.full((2, 3), sum(range(hvd.size()))))


def test_an_array_in_a_convolutions_own_layout():
    """oneDNN keeps a convolution's result in blocks."""
    x, w = mx.nd.ones((2, 16, 9, 9)), mx.nd.ones((16, 16, 3, 3)) * (hvd.rank() + 1)
    y = mx.nd.Convolution(x, w, no_bias=True, kernel=(3, 3), num_filter=16)
    same(hvd.allreduce(y, op=hvd.Sum, name="blocked"), np.full((2, 16, 7, 7), 144 * sum(range(1, hvd.size() + 1))))
    hvd.allreduce_(y, op=hvd.Sum, name="blocked in place")
    same(y, np.full((2, 16, 7, 7), 144 * sum(range(1, hvd.size() + 1))))


def test_broadcast():
    root = hvd.size() - 1
    array = mine()
    same(hvd.broadcast(array, root, name="broadcast"), mine(of=root).asnumpy())
    same(array, mine().asnumpy())
    assert hvd.broadcast_(array, root) is array
    same(array, mine(of=root).asnumpy())


def test_gather_of_different_lengths_and_alltoall():
    array = mx.nd.full((hvd.rank() + 1, 2), hvd.rank())
    expected = np.concatenate([np.full((r + 1, 2), r) for r in range(hvd.size())])
    same(hvd.allgather(array, name="gather"), expected)
    for result in hvd.grouped_allgather([array, array]):
        same(result, expected)
    rows = mx.nd.full((hvd.size(), 3), hvd.rank())
    same(hvd.alltoall(rows), np.repeat(np.arange(hvd.size()), 3).reshape(-1, 3))
    splits = [1] + [0] * (hvd.size() - 1)
    result, received = hvd.alltoall(mx.nd.full((1, 2), hvd.rank()), splits=splits)
    at_root = hvd.rank() == 0
    assert received.asnumpy().tolist() == [1 if at_root else 0] * hvd.size()
    assert result.shape == (hvd.size() if at_root else 0, 2)


def test_reducescatter():
    rows = 2 * hvd.size() + 1
    result = hvd.reducescatter(mine((rows, 2)), op=hvd.Sum, name="scatter")
    whole = np.array_split(sum(all_ranks((rows, 2))), hvd.size())
    same(result, whole[hvd.rank()])
    for each in hvd.grouped_reducescatter([mine((rows, 2))], op=hvd.Average):
        same(each, whole[hvd.rank()] / hvd.size())


def test_process_sets():
    one = hvd.add_process_set([hvd.size() - 1])
    if one.included():
        same(hvd.allreduce(mine(), process_set=one, name="in a set"), mine().asnumpy())
        for operation in (hvd.allreduce, hvd.allgather, hvd.reducescatter, hvd.alltoall):
            same(operation(mine((4, 2)), process_set=one), mine((4, 2)).asnumpy())
        same(hvd.broadcast(mine(), hvd.rank(), process_set=one), mine().asnumpy())
    rows = (hvd.size(), 2)
    same(hvd.allreduce(mine(rows), op=hvd.Sum), sum(all_ranks(rows)))
    same(hvd.allgather(mine(rows)), np.concatenate(all_ranks(rows)))
    same(hvd.reducescatter(mine(rows), op=hvd.Sum), sum(all_ranks(rows))[hvd.rank()][None])
    same(hvd.alltoall(mine(rows)), np.stack([array[hvd.rank()] for array in all_ranks(rows)]))
    same(hvd.broadcast(mine(), 0), mine(of=0).asnumpy())
    hvd.remove_process_set(one)


def test_codecs_and_models():
    for compression in (hvd.Compression.int8(), "topk:0.5"):
        array = mx.nd.ones((4000,))
        hvd.allreduce_(array, name=f"codec {compression}", compression=compression)
        assert np.isfinite(array.asnumpy()).all()
    for _ in range(3):
        result = hvd.allreduce(mx.nd.ones((10,)), name="drop", sync=paceline.DropStragglers(hvd.size()))
        same(result, np.ones(10))
    with pytest.raises(ValueError, match="which is DistributedTrainer's"):
        hvd.allreduce(mx.nd.ones((10,)), sync="ssp:2")


def test_objects():
    assert hvd.broadcast_object({"rank": hvd.rank()}, 0) == {"rank": 0}
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def test_a_failed_operation_raises_where_its_result_is_used_and_leaves_the_job_usable():
    array = hvd.allreduce(mx.nd.ones((hvd.rank() + 2,)), name="disagree")
    with pytest.raises(mx.base.MXNetError, match=r"ranks disagree about"):
        array.asnumpy()
    same(hvd.allreduce(mx.nd.ones((3,)), name="disagree"), np.ones(3))


def test_an_operation_has_no_part_in_the_failure_of_another_of_its_name():
    first = hvd.allreduce(mx.nd.ones((hvd.rank() + 2,)), name="twice")
    second = hvd.allreduce(mx.nd.ones((3,)), op=hvd.Sum, name="twice")
    same(second, np.full(3, hvd.size()))
    with pytest.raises(mx.base.MXNetError, match="ranks disagree about"):
        first.asnumpy()


def test_an_input_that_has_failed_on_one_rank_fails_the_operation_on_all():
    failing = hvd.rank() == hvd.size() - 1
    given = mx.nd.random.normal(0, -1 if failing else 1, (3,))  # the engine finds out that no deviation is negative
    results = [hvd.allreduce(a, op=hvd.Sum, name="failed input") for a in (given, mx.nd.ones((3,)))]
    with pytest.raises(mx.base.MXNetError, match="scale" if failing else "ranks disagree about"):
        results[0].asnumpy()
    same(results[1], np.full(3, hvd.size()))


def test_operations_that_are_refused_fail_alone_among_many():
    """The threads of MXNet submit them together."""
    arrays = [mx.nd.full((4,), i) for i in range(40)]
    for i, array in enumerate(arrays):
        hvd.allreduce_(array, op=hvd.Sum, name=f"among many {i}" + "x" * (5000 if i % 7 == 3 else 0))
    for i, array in enumerate(arrays):
        if i % 7 == 3:
            with pytest.raises(mx.base.MXNetError, match=r"a name of 50\d\d bytes"):
                array.asnumpy()
        else:
            same(array, np.full(4, i * hvd.size()))


def test_a_failure_that_nobody_reads_leaves_the_name_usable():
    hvd.allreduce(mx.nd.ones((hvd.rank() + 2,)), name="unread")
    with pytest.raises(mx.base.MXNetError, match="ranks disagree"):
        mx.nd.waitall()
    same(hvd.allreduce(mx.nd.ones((3,)), name="unread"), np.ones(3))


def test_a_failed_wait_is_horovods_error():
    with pytest.raises(hvd.HorovodInternalError, match="ranks disagree"):
        hvd.allgather(mx.nd.ones((1, 2 + hvd.rank())), name="differ")


def test_what_is_queued_at_a_shutdown_has_no_part_in_the_next_job():
    """Also behind another of its name, and where its input has failed."""
    x = mx.nd.ones((500, 500))
    for _ in range(50 if hvd.rank() == 0 else 0):
        x = mx.nd.dot(x, x) / 500
    inputs = [x[0][:3], mx.nd.random.normal(0, -1, (3,)) + x[1][:3], x[2][:3]]
    older = [hvd.allreduce(a, op=hvd.Sum, name="queued") for a in inputs]
    hvd.shutdown()
    hvd.init()
    later = [hvd.allreduce(mx.nd.full((3,), 10 + i), op=hvd.Sum, name="queued") for i in range(2)]
    for i, result in enumerate(later):
        same(result, np.full(3, (10 + i) * hvd.size()))
    for result in older:  # what it says depends on who has shut down first
        with pytest.raises(mx.base.MXNetError):
            result.asnumpy()


def test_wrong_arguments():
    for call in (hvd.allreduce_, hvd.allreduce, hvd.allgather, hvd.reducescatter, lambda x: hvd.broadcast(x, 0)):
        with pytest.raises(ValueError, match="NDArray is needed"):
            call(np.ones(3))
    with pytest.raises(ValueError, match="cannot be reduced"):
        hvd.allreduce_(mx.nd.ones((3,), dtype="bool"))
    with pytest.raises(ValueError, match="storage type"):
        hvd.broadcast_(mx.nd.ones((3, 2)).tostype("row_sparse"), 0)
    with pytest.raises(ValueError, match="splits are numbers of rows"):
        hvd.alltoall(mx.nd.ones((3,)), splits=[0.5] * hvd.size())
    with pytest.raises(ValueError, match="give only one"):
        hvd.allreduce(mx.nd.ones((3,)), average=True, op=hvd.Sum)
