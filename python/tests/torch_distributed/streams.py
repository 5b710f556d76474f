"""Tensors on a device whose work on them is queued in a stream of the program's: streams.py DEVICE, under torchrun.

What was queued before an operation gets the old elements, what is queued after its wait the new ones, however the
program waits.
"""

import itertools
import sys

import by_name  # noqa: F401
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

DEVICE = sys.argv[1]
SIZE = 1 << 20 if DEVICE == "cuda" else 6


def late(output):
    """Something that reads the output a while after it was queued. Returns where it puts what it read."""
    if DEVICE == "cuda":
        torch.cuda._sleep(100_000_000)
    seen = torch.empty_like(output)
    seen.copy_(output)
    return seen


def rows(value, strided):
    """Two rows of elements."""
    x = torch.full((2, SIZE), float(value), device=DEVICE)
    return x.t().contiguous().t() if strided else x


def operations(rank, strided):
    """Operations by their names: what starts each, its output, and the value of each row of the output after it."""
    x, y, parts = rows(0, strided), rows(rank + 1, strided), list(rows(0, strided))
    one, whole = rows(0, strided)[0], rows(rank + 1, False)
    yield "all_reduce", y, lambda: dist.all_reduce(y, async_op=True), [3, 3]
    y = rows(rank + 1, strided)
    yield "broadcast", y, lambda: dist.broadcast(y, 0, async_op=True), [1, 1]
    seven = rows(7, strided)
    if rank == 0:
        yield "isend", seven, lambda: dist.isend(seven, 1), [7, 7]
    else:
        yield "irecv", x, lambda: dist.irecv(x, 0), [7, 7]
    x = rows(0, strided)
    yield "all_gather", parts, lambda: dist.all_gather(parts, whole[0], async_op=True), [1, 2]
    yield "all_gather_single", x, lambda: dist.all_gather_into_tensor(x, whole[:1], async_op=True), [1, 2]
    yield "reduce_scatter", one, lambda: dist.reduce_scatter(one, list(whole), async_op=True), [3]
    mine = rows(0, strided)[:1]
    yield "reduce_scatter_single", mine, lambda: dist.reduce_scatter_tensor(mine, whole, async_op=True), [3]
    z = rows(0, strided)
    yield "all_to_all_single", z, lambda: dist.all_to_all_single(z, whole, async_op=True), [1, 2]
    into = list(rows(0, strided))
    yield "all_to_all", into, lambda: dist.all_to_all(into, list(whole), async_op=True), [1, 2]
    got = list(rows(0, strided)) if rank == 0 else []
    yield "gather", got, lambda: dist.gather(whole[0], got or None, 0, async_op=True), [1, 2][: len(got)]
    part = rows(0, strided)[0]
    given = list(rows(4, False)) if rank == 1 else None
    yield "scatter", part, lambda: dist.scatter(part, given, 1, async_op=True), [4]


def by_wait(work, outputs):
    work.wait()
    return outputs


def by_future(work, _):
    return tree_leaves(work.get_future().wait())


def by_chain(work, _):
    """The second callback has what the first has queued, and the program what the second has."""

    def copies(future):
        return [late(o) for o in tree_leaves(future.value())]

    return work.get_future().then(copies).then(copies).wait()


def main():
    dist.init_process_group("paceline")
    rank, stream = dist.get_rank(), torch.Stream(DEVICE)
    for wait, strided in itertools.product((by_wait, by_future, by_chain), (False, True)):
        for name, output, start, values in operations(rank, strided):
            which = f"{name}, {wait.__name__}, strided: {strided}"
            outputs = output if isinstance(output, list) else [output]
            before = [o.cpu() for o in outputs]
            torch.accelerator.current_stream().synchronize()
            with stream:
                seen = [late(o) for o in outputs]
                after = [late(o) for o in wait(start(), outputs)]
            stream.synchronize()
            for old, read in zip(before, seen, strict=True):
                assert torch.equal(old, read.cpu()), which
            new = [o.cpu().reshape(-1, SIZE) for o in after]
            expected = torch.tensor(values)[:, None].expand(-1, SIZE).float()
            assert torch.equal(torch.cat([expected[:0], *new]), expected), (which, new)
    x = rows(rank + 1, strided=True)
    torch.accelerator.current_stream().synchronize()
    with stream:
        work = dist.all_reduce(x, async_op=True)
    work.wait()  # and reads it in another stream
    assert x.cpu().eq(3).all(), x
    x = rows(rank + 1, strided=False)
    parts = list(rows(0, strided=False)[:, None]) if rank == 0 else None
    torch.accelerator.current_stream().synchronize()
    for start in (  # without outputs, on one rank and on both
        lambda: dist.gather(x[:1], parts, 0, async_op=True),
        lambda: dist.barrier(async_op=True, device_ids=[torch.accelerator.current_device_index()]),
    ):
        futures = [dist.all_reduce(torch.ones(1), async_op=True).get_future()]
        with stream:
            futures.append(start().get_future())
            for future in (futures[1], torch.futures.collect_all(futures)):
                seen = late(future.then(lambda _: late(x)).wait())
                stream.synchronize()
                assert torch.equal(seen.cpu(), x.cpu()), seen
    future = dist.all_reduce(x.reshape(-1)[: rank + 1], async_op=True).get_future()
    for way in (future.wait, future.value, future.then(lambda ended: ended.value()).wait):
        try:
            way()
        except Exception as e:
            assert isinstance(e, dist.DistBackendError) or way not in (future.wait, future.value), e
            assert "ranks disagree" in str(e) and "Cannot extract" not in str(e), e
        else:
            raise AssertionError("no error of different sizes")
    print(f"rank {rank} is done\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
