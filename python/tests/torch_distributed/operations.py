"""Every operation of torch.distributed on two ranks, under torchrun: operations.py BACKEND DEVICE [OTHER].

OTHER: the default device while the backend's own code runs, as a script may have one for what it makes itself.
"""

import re
import sys
import time
from datetime import timedelta

import by_name  # noqa: F401
import lives
import torch
import torch.distributed as dist

BACKEND, DEVICE, *OTHER = sys.argv[1:]
SPARSE = "cpu" if DEVICE == "offhost" else DEVICE  # it has no sparse tensors
REDUCED = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
REDUCED += [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SENT = [*REDUCED, torch.bool, torch.uint16, torch.float8_e4m3fn]


def of(rank, dtype=torch.float32, shape=(3, 2)):
    """A rank's tensor."""
    return torch.arange(6).reshape(shape).add(rank + 1).to(dtype)


def same(given, wanted):
    assert given.dtype == wanted.dtype and given.shape == wanted.shape, (given, wanted)
    assert torch.equal(given.view(torch.uint8), wanted.view(torch.uint8)), (given, wanted)


def refuses(words, call, errors=(RuntimeError, ValueError)):
    """The call raises an error with one of these words."""
    try:
        call()
    except errors as e:
        assert re.search(words, str(e)), e
    else:
        raise AssertionError(f"no error of {words}")


def reductions(rank):
    for dtype in REDUCED:
        for strided in (False, True):
            x = of(rank, dtype)
            x = x.t().contiguous().t() if strided else x
            dist.all_reduce(x)
            same(x.contiguous(), of(0, dtype) + of(1, dtype))
    both = of(0, torch.int32), of(1, torch.int32)
    wanted = {
        "MIN": torch.minimum(*both),
        "MAX": torch.maximum(*both),
        "PRODUCT": both[0] * both[1],
        "BAND": both[0] & both[1],
        "BOR": both[0] | both[1],
        "BXOR": both[0] ^ both[1],
    }
    for op, result in wanted.items():
        x = of(rank, torch.int32)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        same(x, result)
        mine = torch.zeros(2, dtype=torch.int32)
        dist.reduce_scatter_tensor(mine, of(rank, torch.int32).view(-1)[:4].contiguous(), getattr(dist.ReduceOp, op))
        same(mine, result.view(-1)[2 * rank : 2 * rank + 2])
        mine = torch.zeros(1 + rank, dtype=torch.int32)  # of parts of different sizes
        parts = list(of(rank, torch.int32).view(-1)[:3].split([1, 2]))
        dist.reduce_scatter(mine, parts, getattr(dist.ReduceOp, op))
        same(mine, result.view(-1)[rank : 1 + 2 * rank])
    for op, result in {"BAND": [False, False], "BOR": [True, True], "BXOR": [True, True]}.items():
        mine = torch.zeros(1, dtype=torch.bool)
        dist.reduce_scatter_tensor(mine, torch.tensor([rank == 0, rank == 1]), getattr(dist.ReduceOp, op))
        same(mine, torch.tensor(result[rank : rank + 1]))
    refuses("AVG|Float", lambda: dist.all_reduce(torch.tensor([True]), dist.ReduceOp.AVG))
    x = of(rank)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    same(x, (of(0) + of(1)) / 2)
    x = of(rank)
    dist.all_reduce(x, torch.distributed._make_nccl_premul_sum(2.0))
    same(x, 2 * (of(0) + of(1)))
    flags = torch.tensor([rank == 0, False])
    dist.all_reduce(flags)
    same(flags, torch.tensor([True, False]))
    for root in (0, 1):
        x = of(rank)
        dist.reduce(x, root)
        same(x, of(0) + of(1) if rank == root else of(rank))
    x = torch.sparse_coo_tensor([[rank, rank + 1]], [1.0, 2.0], (4,), device=SPARSE, check_invariants=True)
    dist.all_reduce(x)
    same(x.to_dense(), torch.tensor([1.0, 3.0, 2.0, 0.0], device=SPARSE))
    sparse_tensors(rank)
    some = [of(rank), of(rank, shape=(6,))]
    dist.all_reduce_coalesced(some)
    same(some[0], of(0) + of(1))
    same(some[1], of(0, shape=(6,)) + of(1, shape=(6,)))
    several_types(rank)
    parts = torch.stack([of(rank), 10 * of(rank)])
    for call in (dist.reduce_scatter_tensor, lambda o, i: dist.reduce_scatter(o, list(i))):
        x = torch.empty(3, 2)
        call(x, parts)
        same(x, (of(0) + of(1)) * (1 if rank == 0 else 10))


def sparse_tensors(rank):
    """What cannot be computed of the elements that ranks have is an error."""

    def mine(dtype, shape=(4,)):
        indices, values = [[0]] * len(shape), torch.ones(1, dtype=dtype, device=SPARSE)
        return torch.sparse_coo_tensor(indices, values, shape, device=SPARSE, check_invariants=True)

    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR, dist.ReduceOp.MAX):
        refuses("sparse tensors", lambda op=op: dist.all_reduce(mine(torch.int32), op))
    factor = torch.distributed._make_nccl_premul_sum(2.0)
    refuses("sparse tensors", lambda: dist.all_reduce(mine(torch.float32), factor))
    for shapes in [(4,), (400,)], [(4, 4), (16,)], [(4, 1), (1, 4)]:
        refuses("Sparse dimensions do not match", lambda s=shapes: dist.all_reduce(mine(torch.float32, s[rank])))


def several_types(rank):
    """Each tensor of a list is reduced as its type is, whichever comes first.

    PyTorch's functional collectives call the group's methods; its all_reduce_coalesced takes one type only.
    """
    whole = dist.group.WORLD

    def reduce(tensors, op=dist.ReduceOp.SUM):
        options = dist.distributed_c10d.AllreduceCoalescedOptions()
        options.reduceOp = op
        whole.allreduce_coalesced(tensors, options).wait()

    for first in (False, True):
        flags, numbers, floats = torch.tensor([rank == 0, True, False]), of(rank, torch.int32), of(rank)
        some = [flags, numbers, floats] if first else [floats, numbers, flags]
        reduce(some)
        same(flags, torch.tensor([True, True, False]))
        same(numbers, of(0, torch.int32) + of(1, torch.int32))
        same(floats, of(0) + of(1))
        flags, numbers = torch.tensor([rank == 0, True, False]), of(rank, torch.int32)
        reduce([flags, numbers] if first else [numbers, flags], dist.ReduceOp.BAND)
        same(flags, torch.tensor([False, True, False]))
        same(numbers, of(0, torch.int32) & of(1, torch.int32))
        wholes = [torch.tensor([rank == 0, True]), of(rank).view(-1)[:4].contiguous()]
        shares = [torch.zeros(1, dtype=torch.bool), torch.zeros(2)]
        if not first:
            wholes, shares = wholes[::-1], shares[::-1]
        whole.reduce_scatter_tensor_coalesced(shares, wholes).wait()
        flag, share = shares if first else shares[::-1]
        same(flag, torch.tensor([True]))
        same(share, (of(0) + of(1)).view(-1)[2 * rank : 2 * rank + 2])
    some = [torch.tensor([1], dtype=torch.int32), torch.ones(2)]
    refuses("non-integral", lambda: reduce(some, dist.ReduceOp.BAND))


def transfers(rank):
    for dtype in SENT:
        x = of(rank, dtype)
        dist.broadcast(x, 1)
        same(x, of(1, dtype))
        x = [torch.empty(3, 2, dtype=dtype) for _ in range(2)]
        dist.all_gather(x, of(rank, dtype))
        same(x[0], of(0, dtype)), same(x[1], of(1, dtype))
    x = torch.empty(6, 2)
    dist.all_gather_into_tensor(x, of(rank))
    strided = torch.zeros(2, 6).t()
    dist.all_gather_into_tensor(strided, of(rank))
    same(strided.contiguous(), torch.cat([of(0), of(1)]))
    same(x, torch.cat([of(0), of(1)]))
    x = [torch.empty(3, 2) for _ in range(2)] if rank == 1 else None
    dist.gather(of(rank), x, dst=1)
    if rank == 1:
        same(x[0], of(0)), same(x[1], of(1))
    x = torch.empty(3, 2)
    dist.scatter(x, [of(5), of(6)] if rank == 0 else None, src=0)
    same(x, of(5 + rank))
    x = torch.empty(6)
    dist.all_to_all_single(x, of(rank, shape=(6,)))
    same(x, torch.cat([of(r, shape=(6,))[3 * rank : 3 * rank + 3] for r in range(2)]))
    gives, gets = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    x = torch.empty(sum(gets))
    dist.all_to_all_single(x, torch.arange(4.0) + 10 * rank, gets, gives)
    same(x, torch.tensor([0.0, 10.0, 11.0] if rank == 0 else [1.0, 2.0, 3.0, 12.0, 13.0]))
    x = [torch.empty(1), torch.empty(2)]
    dist.all_to_all(x, [torch.full((rank + 1,), float(to)) for to in range(2)])
    same(x[0], torch.full((1,), float(rank))), same(x[1], torch.full((2,), float(rank)))


def objects(rank):
    """What PyTorch unpickles is authenticated on every connection."""
    from paceline.torch.distributed.group import Group, abi

    begun, plain = [], Group.op

    def op(self, *arguments, **options):
        begun.append(plain(self, *arguments, **options))
        return begun[-1]

    Group.op = op
    everybody, scattered, told = [None, None], [None], [{"rank": rank}]
    dist.all_gather_object(everybody, {"rank": rank})
    assert everybody == [{"rank": 0}, {"rank": 1}]
    dist.gather_object("mine", [None, None] if rank == 0 else None)
    dist.scatter_object_list(scattered, ["for 0", "for 1"])
    assert scattered == [f"for {rank}"]
    dist.broadcast_object_list(told, src=1)
    assert told == [{"rank": 1}]
    if hasattr(dist, "send_object_list"):
        dist.send_object_list(told, 1) if rank == 0 else dist.recv_object_list(told, 0)
    Group.op = plain
    moved = [op for op in begun if op.dtype == abi.UINT8]
    assert len({op.kind for op in moved}) > 2 and all(op.authenticated for op in moved), [op.kind for op in moved]


def messages(rank):
    other = 1 - rank
    sent = [dist.isend(of(tag), other, tag=tag) for tag in (3, 4)]
    later, earlier = torch.empty(3, 2), torch.empty(3, 2)
    dist.recv(later, other, tag=4)
    assert dist.recv(earlier, tag=3) == other
    refuses("[Tt]ag", lambda: dist.send(of(0), other, tag=-1))
    refuses("[Tt]ag", lambda: dist.recv(of(0), other, tag=-1))
    same(later, of(4)), same(earlier, of(3))
    for work in sent:
        work.wait()
        assert work.is_completed()


def late_messages(rank):
    """A wait that runs out of time leaves a message as it is: the next one waits for it."""
    first, second = torch.zeros(2), torch.zeros(2)
    if rank == 1:
        work = dist.irecv(first, 0)
        refuses("Timed out waiting 0.1 s.* wait.. again", lambda: work.wait(timedelta(seconds=0.1)), RuntimeError)
        assert not work.is_completed() and work.exception() is None
        dist.send(torch.ones(1), 0)
        dist.recv(second, 0)
        work.wait()
        assert work.is_success()
        same(first, torch.ones(2)), same(second, torch.full((2,), 2.0))
    else:
        dist.recv(torch.zeros(1), 1)
        for i in (1.0, 2.0):
            dist.send(torch.full((2,), i), 1)


def groups(rank):
    x = torch.ones(2)
    first, second, own = (
        dist.new_group([0, 1]),
        dist.new_group([0, 1]),
        dist.new_group([rank], use_local_synchronization=True),
    )
    order = (first, second) if rank == 0 else (second, first)  # each group has an order of its own
    for work in [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in order]:
        work.wait()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77), own)
    assert own._get_backend(torch.device("cpu")).group.timeout_s == 77
    dist.all_reduce(x, group=own)
    same(x, torch.ones(2))
    alone = dist.new_group([1])
    if rank == 1:
        dist.all_reduce(x, group=alone)
        same(x, torch.ones(2))
    dist.barrier()
    dist.monitored_barrier()


def methods_of_the_group(rank):
    """Their short forms, too: PyTorch's own functions do not use these."""
    group, mine, both = dist.group.WORLD, of(rank), [torch.zeros(3, 2), torch.zeros(3, 2)]
    sum, most, sent = of(rank), of(rank), of(rank)
    group.allreduce(sum).wait()
    group.allreduce([most], dist.ReduceOp.MAX).wait()
    group.broadcast(sent, root=1).wait()
    group.allgather(both, mine).wait()
    group.barrier(timeout=timedelta(seconds=60)).wait()
    assert torch.equal(sum, of(0) + of(1)) and torch.equal(most, of(1)) and torch.equal(sent, of(1))
    assert torch.equal(torch.stack(both), torch.stack([of(0), of(1)]))
    part, whole, swapped = torch.zeros(3), torch.zeros(3), torch.zeros(2)
    group.reduce_scatter(part, [torch.ones(3), torch.zeros(3)], op=dist.ReduceOp.SUM).wait()
    group.scatter(whole, [torch.ones(3), torch.zeros(3)] if rank == 0 else [], 0).wait()
    group.alltoall_base(swapped, torch.full((2,), float(rank)), [], []).wait()
    group.allreduce(tensors=[whole], op=dist.ReduceOp.MAX).wait()
    group.allgather(input_tensor=mine, output_tensors=both).wait()
    if rank == 0:
        group.send([mine], dstRank=1, tag=3).wait()
    else:
        group.recv([mine], srcRank=0, tag=3).wait()
        assert torch.equal(mine, of(0))
    for wrong in (lambda: group.allreduce(), lambda: group.allreduce([mine], foo=1), lambda: group.barrier(1, 2, 3)):
        refuses("process group|incompatible", wrong, TypeError)
    assert part.tolist() == [2.0 * (1 - rank)] * 3 and whole.tolist() == [1.0] * 3
    assert swapped.tolist() == [0.0, 1.0]


def works_and_failures(rank):
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert torch.equal(work.get_future().wait()[0], torch.full((3,), 2.0))
    assert work.is_completed() and work.is_success() and work.exception() is None
    try:
        dist.all_reduce(torch.ones(3 + rank))
        raise AssertionError("ranks of different shapes agree")
    except dist.DistBackendError as e:
        assert "ranks disagree" in str(e) and "[3]" in str(e) and "[4]" in str(e), e
    for call in (dist.broadcast, dist.reduce, dist.send, dist.recv, dist.gather, dist.scatter):
        place = {dist.gather: "dst", dist.scatter: "src"}.get(call)
        try:
            call(torch.ones(3), **{place: 2}) if place else call(torch.ones(3), 2)
            raise AssertionError(f"{call.__name__} takes a rank that there is not")
        except ValueError as e:
            assert "rank 2 in a group of 2 ranks" in str(e), e
    refuses(r"outputs of \[2, 4\] elements", lambda: dist.all_gather([torch.ones(2), torch.ones(4)], torch.ones(3)))
    dist.all_reduce(torch.ones(3))  # the group goes on


def as_gloo(rank):
    """Ends of works: made by another thread in the mode of the caller's, waited for again, and of the same form."""
    with torch.inference_mode():
        outputs = [torch.empty(3, 2) for _ in range(2)]
        work = dist.all_gather(outputs, of(rank), async_op=True)
        while not work.get_future().done():  # the library's thread completes it
            time.sleep(0.01)
        work.wait()
    for r, output in enumerate(outputs):
        same(output, of(r))
    total = of(rank)
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    work = dist.all_reduce(total, async_op=True)
    if rank == 0:
        refuses("Timed out waiting", lambda: work.wait(timedelta(seconds=0.1)), RuntimeError)
        assert not work.is_completed()
        refuses("needs to be completed before", work.result, RuntimeError)
        dist.send(torch.ones(1), 1)
    work.wait()
    same(total, of(0) + of(1))
    same(work.result()[0], total)
    parts = [torch.empty(3, 2) for _ in range(2)] if rank == 0 else None
    gathered = dist.gather(of(rank), parts, 0, async_op=True).get_future().wait()
    for r, part in enumerate(gathered):
        same(part, of(r))
    assert len(gathered) == (2 if rank == 0 else 0)
    refuses("outputs are not of", lambda: dist.all_gather_into_tensor(torch.empty(6, 2, dtype=torch.int32), of(rank)))


def elsewhere(device):
    """Has the backend's operations, and the ends of their works, run with another default device."""
    from paceline.torch.distributed import operations, work
    from paceline.torch.distributed.backend import PacelineBackend

    def within(method):
        def call(*args, **kwargs):
            with torch.device(device):
                return method(*args, **kwargs)

        return call

    for kind in PacelineBackend.__mro__:
        if issubclass(kind, operations.Operations):
            for name, method in vars(kind).items():
                if callable(method) and not name.startswith("__"):
                    setattr(kind, name, within(method))
    work.PacelineWork._collect = within(work.PacelineWork._collect)


def main():
    torch.set_default_device(DEVICE)
    for device in OTHER:
        elsewhere(device)
    for _ in range(2):  # a world after another
        lives.begin(BACKEND)
        assert dist.get_backend() == BACKEND and dist.get_world_size() == 2
        rank = dist.get_rank()
        work = dist.barrier(async_op=True)
        work.wait()
        assert type(work).__name__ == "PacelineWork", type(work)
        for check in (
            reductions,
            transfers,
            objects,
            messages,
            late_messages,
            groups,
            methods_of_the_group,
            works_and_failures,
            as_gloo,
        ):
            check(rank)
        dist.destroy_process_group()
    print(f"rank {rank} is done\n", end="", flush=True)


if __name__ == "__main__":
    main()
