"""Every collective against torch on all ranks' tensors, which each rank can compute."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import paceline.torch as hvd

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ALL = [*INTEGERS, *FLOATS, torch.bool]

PARTITION = 4 << 20
# Elements of one byte up to eight: empty, scalar-like, odd, around a partition of float32.
COUNTS = [0, 1, 2, 17, 1000, PARTITION // 4 - 1, PARTITION // 4, PARTITION // 4 + 1]
SHAPES = [(), (1,), (5,), (2, 3), (2, 3, 4), (3, 0, 2)]


def everyones(shape, dtype, low=0, high=6, size=None):
    """The tensors of all ranks: small whole numbers, which every type sums exactly."""
    return [torch.randint(low, high, shape).to(dtype) for _ in range(size or hvd.size())]


def stacked(tensors):
    """All ranks' tensors as one, in a type in which nothing is lost."""
    return torch.stack([t.double() for t in tensors])


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_allreduce_sums(dtype, shape, rank):
    all_ranks = everyones(shape, dtype)
    before = all_ranks[rank].clone()
    result = hvd.allreduce(all_ranks[rank], op=hvd.Sum)
    assert result.dtype == dtype and result.shape == torch.Size(shape)
    assert torch.equal(result, stacked(all_ranks).sum(0).to(dtype))
    assert torch.equal(all_ranks[rank], before)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64], ids=str)
def test_allreduce_sums_around_partition_sizes(dtype, count, rank):
    all_ranks = everyones((count,), dtype)
    assert torch.equal(hvd.allreduce(all_ranks[rank], op=hvd.Sum), stacked(all_ranks).sum(0).to(dtype))


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_allreduce_takes_the_other_operators(dtype, op, rank):
    all_ranks = everyones((7, 5), dtype, low=1, high=3)
    reduced = stacked(all_ranks)
    expected = {"Min": reduced.amin(0), "Max": reduced.amax(0), "Product": reduced.prod(0)}[op]
    assert torch.equal(hvd.allreduce(all_ranks[rank], op=getattr(hvd, op)), expected.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_allreduce_averages_by_default(dtype, rank, size):
    all_ranks = [t * size for t in everyones((9,), dtype)]
    assert torch.equal(hvd.allreduce(all_ranks[rank]), stacked(all_ranks).mean(0).to(dtype))


def test_average_argument_still_works_with_a_warning(rank):
    all_ranks = everyones((3,), torch.float32)
    with pytest.warns(DeprecationWarning, match="use op="):
        assert torch.equal(hvd.allreduce(all_ranks[rank], average=False), stacked(all_ranks).sum(0).float())


def test_ranks_end_bit_identical():
    mine = torch.rand(100_003, generator=torch.Generator().manual_seed(hvd.rank()))
    reduced = hvd.allreduce(mine)
    assert all(torch.equal(reduced, other) for other in hvd.allgather(reduced.unsqueeze(0)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_prescale_and_postscale_multiply_before_and_after(dtype, rank, size):
    all_ranks = [t * size for t in everyones((11,), dtype)]
    result = hvd.allreduce(all_ranks[rank], op=hvd.Average, prescale_factor=0.5, postscale_factor=4.0)
    assert torch.equal(result, (stacked(all_ranks).mean(0) * 2).to(dtype))


def test_fp16_compression_halves_precision_and_keeps_the_type(rank):
    all_ranks = [torch.rand(50) for _ in range(hvd.size())]
    result = hvd.allreduce(all_ranks[rank], compression=hvd.Compression.fp16)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, stacked(all_ranks).mean(0).float(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float64], ids=str)
def test_in_place_allreduce_returns_the_tensor_itself(dtype, rank):
    all_ranks = everyones((4, 4), dtype)
    mine = all_ranks[rank].clone()
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    assert torch.equal(mine, stacked(all_ranks).sum(0).to(dtype))


def test_handles_poll_true_once_done(rank):
    handles = [hvd.allreduce_async(torch.full((5,), float(rank + i)), op=hvd.Max) for i in range(10)]
    assert all(isinstance(h, int) for h in handles)
    for i, handle in enumerate(handles):
        assert torch.equal(hvd.synchronize(handle), torch.full((5,), float(hvd.size() - 1 + i)))
    assert hvd.synchronize(handles[0]) is None
    with pytest.raises(ValueError, match="synchronized already"):
        hvd.poll(handles[0])


def test_poll_becomes_true(rank):
    handle = hvd.allreduce_async(torch.ones(3))
    while not hvd.poll(handle):
        pass
    assert torch.equal(hvd.synchronize(handle), torch.ones(3))


def test_named_operations_match_whatever_the_order(rank, size):
    order = list(range(50))
    random.Random(rank).shuffle(order)
    handles = {i: hvd.allreduce_async(torch.full((i,), float(i)), op=hvd.Sum, name=f"shuffled.{i}") for i in order}
    for i, handle in handles.items():
        assert torch.equal(hvd.synchronize(handle), torch.full((i,), float(i * size)))


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
def test_grouped_allreduce_equals_single_ones(dtype, rank):
    groups = [everyones(shape, dtype) for shape in [(3,), (), (2, 2), (0,)]]
    results = hvd.grouped_allreduce([g[rank] for g in groups], op=hvd.Sum, name=f"group.{dtype}")
    assert isinstance(results, list)
    for result, group in zip(results, groups, strict=True):
        assert torch.equal(result, stacked(group).sum(0).to(dtype))


def test_grouped_allreduce_in_place_and_async(rank, size):
    mine = [torch.full((n,), float(rank)) for n in (1, 5)]
    handle = hvd.grouped_allreduce_async_(mine, op=hvd.Sum)
    outputs = hvd.synchronize(handle)
    assert isinstance(outputs, tuple) and all(a is b for a, b in zip(outputs, mine, strict=True))
    assert torch.equal(mine[1], torch.full((5,), size * (size - 1) / 2))
    out = hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Max))
    assert torch.equal(out[0], mine[0]) and out[0] is not mine[0]
    assert torch.equal(hvd.grouped_allreduce_([torch.ones(2)], op=hvd.Sum)[0], torch.full((2,), float(size)))


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("inner", [(), (3,), (2, 2), (0,)], ids=str)
def test_allgather_takes_unequal_first_dimensions(dtype, inner, rank, size):
    all_ranks = [torch.randint(0, 2, (r, *inner)).to(dtype) for r in range(size)]  # rank 0 has no rows
    result = hvd.allgather(all_ranks[rank])
    assert result.dtype == dtype
    assert torch.equal(result, torch.cat(all_ranks))


def test_what_is_gathered_may_be_changed_in_place(rank, size):
    """As in losses that put this rank's own rows, with their graph, among the others'."""
    own = torch.full((2, 3), float(rank), requires_grad=True)
    for gather in hvd.allgather, lambda x: hvd.grouped_allgather([x])[0], hvd.alltoall if size == 2 else hvd.allgather:
        gathered = gather(own)
        gathered /= size
        gathered.sum().backward()
    with torch.no_grad():
        gathered = hvd.allgather(own)
    gathered[2 * rank : 2 * rank + 2] = own
    waited = hvd.synchronize(hvd.allgather_async(own.detach()))
    waited[:2] = own
    assert gathered.requires_grad and waited.requires_grad
    assert torch.equal(gathered, torch.cat([torch.full((2, 3), float(r)) for r in range(size)]))


def test_allgather_of_nothing_at_all():
    assert hvd.allgather(torch.empty(0, 3)).shape == (0, 3)


def test_large_allgather(rank, size):
    rows = 1 << 18
    gathered = hvd.allgather(torch.full((rows + rank, 5), float(rank)))
    assert torch.equal(gathered, torch.cat([torch.full((rows + r, 5), float(r)) for r in range(size)]))


def test_gathered_memory_outlives_its_handle(rank, size):
    kept = [hvd.allgather(torch.full((1000,), i)) for i in range(20)]
    assert all(torch.equal(t, torch.full((1000 * size,), i)) for i, t in enumerate(kept))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bool], ids=str)
def test_grouped_allgather(dtype, rank, size):
    groups = [[torch.randint(0, 2, (r + n, 2)).to(dtype) for r in range(size)] for n in range(3)]
    results = hvd.grouped_allgather([g[rank] for g in groups])
    for result, group in zip(results, groups, strict=True):
        assert torch.equal(result, torch.cat(group))


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_broadcast_from_every_root(dtype, shape, rank, size):
    all_ranks = everyones(shape, dtype, high=2)
    for root in range(size):
        mine = all_ranks[rank].clone()
        assert torch.equal(hvd.broadcast(mine, root), all_ranks[root])
        assert torch.equal(mine, all_ranks[rank])
        assert hvd.broadcast_(mine, root) is mine
        assert torch.equal(mine, all_ranks[root])


@pytest.mark.parametrize("count", COUNTS)
def test_broadcast_around_partition_sizes(count, rank, size):
    all_ranks = everyones((count,), torch.float32)
    assert torch.equal(hvd.broadcast(all_ranks[rank], size - 1), all_ranks[size - 1])


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_alltoall_in_equal_parts(dtype, rank, size):
    all_ranks = everyones((2 * size, 3), dtype, high=2)
    result = hvd.alltoall(all_ranks[rank])
    assert torch.equal(result, torch.cat([t[2 * rank : 2 * rank + 2] for t in all_ranks]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("kind", ["list", "int32", "int64"])
def test_alltoall_with_splits_returns_the_received_ones(dtype, kind, rank, size):
    def split(sender):
        return [(sender + receiver) % 3 for receiver in range(size)]

    all_ranks = [torch.randint(0, 2, (sum(split(r)), 2)).to(dtype) for r in range(size)]
    splits = split(rank) if kind == "list" else torch.tensor(split(rank), dtype=getattr(torch, kind))
    result, received = hvd.alltoall(all_ranks[rank], splits)
    assert received.tolist() == [split(r)[rank] for r in range(size)]
    assert received.dtype == (torch.int32 if kind == "list" else splits.dtype)
    assert torch.equal(result, torch.cat([t.split(split(r))[rank] for r, t in enumerate(all_ranks)]))


def test_alltoall_async_gives_a_pair_with_and_without_splits(size):
    result, received = hvd.synchronize(hvd.alltoall_async(torch.arange(size)))
    assert received.tolist() == [1] * size and result.shape == (size,)


def test_alltoall_leaves_rows_beyond_the_splits_at_home(rank, size):
    result, _ = hvd.alltoall(torch.full((size + 5, 2), float(rank)), [1] * size)
    assert torch.equal(result, torch.arange(float(size)).view(-1, 1).expand(-1, 2))


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 4, 7, 8])
def test_reducescatter_shares_rows_evenly_first_ranks_first(dtype, rows, rank, size):
    all_ranks = everyones((rows, 3), dtype)
    share, over = divmod(rows, size)
    counts = [share + (r < over) for r in range(size)]
    expected = stacked(all_ranks).sum(0).to(dtype).split(counts)[rank]
    assert torch.equal(hvd.reducescatter(all_ranks[rank], op=hvd.Sum), expected)


def test_reducescatter_averages_by_default_and_scales(rank, size):
    all_ranks = [t * size for t in everyones((size, 5), torch.float64)]
    mean = stacked(all_ranks).mean(0)[rank : rank + 1]
    assert torch.equal(hvd.reducescatter(all_ranks[rank]), mean)
    scaled = hvd.reducescatter(all_ranks[rank], prescale_factor=0.5, postscale_factor=4.0)
    assert torch.equal(scaled, mean * 2)


def test_grouped_reducescatter(rank, size):
    groups = [everyones((size * n, 2), torch.float32) for n in (1, 3)]
    results = hvd.grouped_reducescatter([g[rank] for g in groups], op=hvd.Sum)
    for n, result, group in zip((1, 3), results, groups, strict=True):
        assert torch.equal(result, stacked(group).sum(0).float()[rank * n : (rank + 1) * n])


def test_large_reducescatter(rank, size):
    rows = PARTITION // 4 + 3
    result = hvd.reducescatter(torch.ones(rows, 2), op=hvd.Sum)
    assert torch.equal(result, torch.full_like(result, float(size)))
    assert sum(hvd.allgather(torch.tensor([len(result)]))) == rows


def test_adasum_of_equal_tensors_is_the_tensor_and_of_orthogonal_ones_the_sum(rank, size):
    torch.testing.assert_close(hvd.allreduce(torch.full((8,), 3.0), op=hvd.Adasum), torch.full((8,), 3.0))
    one_hot = torch.zeros(8, dtype=torch.float64)
    one_hot[rank] = rank + 1.0
    expected = torch.zeros(8, dtype=torch.float64)
    expected[:size] = torch.arange(1.0, size + 1, dtype=torch.float64)
    torch.testing.assert_close(hvd.allreduce(one_hot, op=hvd.Adasum), expected)


def test_barrier_lets_nobody_pass_before_the_last(rank, size, tmp_path_factory):
    for _ in range(20):
        hvd.barrier()
    hvd.barrier(process_set=hvd.global_process_set)


@pytest.mark.parametrize("kind", ["transposed", "strided", "channels_last", "expanded input", "offset view"])
def test_any_strides_do_and_in_place_results_land_in_the_tensor(kind, rank, size):
    def make(fill):
        base = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).view(2, 3, 4, 4) + fill
        return {
            "transposed": base.transpose(1, 3),
            "strided": base[:, :, ::2, 1::2],
            "channels_last": base.contiguous(memory_format=torch.channels_last),
            "expanded input": base[:1, :1].expand(2, 3, 4, 4),
            "offset view": base[1],
        }[kind]

    all_ranks = [make(float(r)) for r in range(size)]
    expected = stacked(all_ranks).sum(0).float()
    assert torch.equal(hvd.allreduce(all_ranks[rank], op=hvd.Sum), expected)
    assert torch.equal(hvd.broadcast(all_ranks[rank], 1), all_ranks[1])
    assert torch.equal(hvd.allgather(all_ranks[rank]), torch.cat(all_ranks))
    if kind != "expanded input":
        strides = all_ranks[rank].stride()
        assert torch.equal(hvd.allreduce_(all_ranks[rank], op=hvd.Sum), expected)
        assert all_ranks[rank].stride() == strides and torch.equal(all_ranks[rank], expected)


def test_ranks_may_lay_out_the_same_tensor_differently(rank, size):
    base = torch.arange(48.0).view(2, 3, 2, 4)
    mine = base.contiguous(memory_format=torch.channels_last) if rank % 2 else base.clone()
    hvd.allreduce_(mine, op=hvd.Sum)
    assert torch.equal(mine, base * size)


def test_in_place_operations_reach_parameters(rank, size):
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    hvd.broadcast_(parameter, 1)
    assert torch.equal(parameter.detach(), torch.ones(3)) and parameter.requires_grad
    hvd.allreduce_(parameter, op=hvd.Sum)
    assert torch.equal(parameter.detach(), torch.full((3,), float(size)))


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_sparse_allreduce_adds_up_equal_indices(op, rank, size):
    all_ranks = []
    for r in range(size):
        indices = torch.tensor([[0, r + 1, 0], [1, r % 3, 1]])  # (0, 1) twice on every rank
        all_ranks.append(
            torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0 + r, 3.0]), (size + 1, 3), check_invariants=True)
        )
    result = hvd.sparse_allreduce_async(all_ranks[rank], name=f"sparse.{op}", op=getattr(hvd, op))()
    assert result.is_sparse
    expected = sum(t.to_dense() for t in all_ranks) / (size if op == "Average" else 1)
    torch.testing.assert_close(result.to_dense(), expected)


def test_sparse_allreduce_where_a_rank_has_no_elements(rank, size):
    mine = torch.sparse_coo_tensor(
        torch.zeros(1, rank, dtype=torch.int64), torch.ones(rank, 4), (3, 4), check_invariants=True
    )
    result = hvd.sparse_allreduce_async(mine, name="sparse.uneven", op=hvd.Sum)()
    assert result.to_dense()[0].tolist() == [size * (size - 1) / 2] * 4


def test_many_small_tensors_in_flight(rank, size):
    handles = [hvd.allreduce_async(torch.full((i % 7,), 1.0), op=hvd.Sum) for i in range(2000)]
    for i, handle in enumerate(handles):
        assert torch.equal(hvd.synchronize(handle), torch.full((i % 7,), float(size)))


def test_64_mib(rank, size):
    mine = torch.full((16 << 20,), float(rank))
    hvd.allreduce_(mine, op=hvd.Sum)
    assert torch.equal(mine, torch.full_like(mine, size * (size - 1) / 2))


KINDS = {
    "allreduce": lambda rank, size: hvd.allreduce_async_(torch.full((4,), float(rank)), op=hvd.Sum, name="weights"),
    "grouped_allreduce": lambda rank, size: hvd.grouped_allreduce_async_([torch.ones(4)], op=hvd.Sum, name="weights"),
    "broadcast": lambda rank, size: hvd.broadcast_async_(torch.full((5,), float(rank)), size - 1, name="weights"),
    "allgather": lambda rank, size: hvd.allgather_async(torch.tensor([rank]), name="weights"),
    "alltoall": lambda rank, size: hvd.alltoall_async(torch.full((size,), rank), name="weights"),
    "reducescatter": lambda rank, size: hvd.reducescatter_async(torch.ones(size, 2), op=hvd.Sum, name="weights"),
}


@pytest.mark.parametrize("waits", [False, True], ids=["asynchronous", "synchronous"])
def test_operations_of_each_kind_have_names_of_their_own(waits, rank, size):
    """All of them are in flight together, begun in another order on each rank; and of threads that wait for theirs."""
    ranks = torch.arange(size)
    order = list(KINDS)[rank % len(KINDS) :] + list(KINDS)[: rank % len(KINDS)]
    for _ in range(3):
        if waits:
            with ThreadPoolExecutor(len(order)) as threads:
                ends = [threads.submit(lambda kind: hvd.synchronize(KINDS[kind](rank, size)), kind) for kind in order]
                got = dict(zip(order, (end.result() for end in ends), strict=True))
        else:
            handles = {kind: KINDS[kind](rank, size) for kind in order}
            got = {kind: hvd.synchronize(handle) for kind, handle in handles.items()}
        assert torch.equal(got["allreduce"], torch.full((4,), float(ranks.sum())))
        assert torch.equal(got["grouped_allreduce"][0], torch.full((4,), float(size)))
        assert torch.equal(got["broadcast"], torch.full((5,), float(size - 1)))
        assert torch.equal(got["allgather"], ranks)
        assert torch.equal(got["alltoall"][0], ranks)
        assert torch.equal(got["reducescatter"], torch.full((1, 2), float(size)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("grouped_allreduce",)])
def test_one_kind_has_a_name_once_at_a_time(kind, rank, size):
    handle = KINDS[kind](rank, size) if rank == 0 else None
    if rank == 0:
        with pytest.raises(ValueError, match=r'in flight: "([a-z]+\.)?weights" on rank 0'):
            KINDS[kind](rank, size)
    hvd.barrier()
    hvd.synchronize(KINDS[kind](rank, size) if handle is None else handle)
