"""Collective operations that callbacks of futures begin, while the program begins others, match on all ranks."""

import sys
import threading
import time
from datetime import timedelta

import by_name  # noqa: F401
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("paceline", timeout=timedelta(seconds=30))
rank, size = dist.get_rank(), dist.get_world_size()
other = dist.new_group([1, 0])
HOW = {
    "blocking": lambda y: dist.all_reduce(y),
    "waiting": lambda y: dist.all_reduce(y, async_op=True).wait(),
    "nested": lambda y: dist.all_reduce(y, async_op=True).get_future().then(lambda f: f.value()[0]).wait(),
    "of another group": lambda y: dist.all_reduce(y, group=other, async_op=True).wait(),
}


def sums(how, late):
    """How many of the second sums are not the first callback's. late: half of the callbacks come after their works."""
    xs = [torch.full((1000,), float(i)) for i in range(12)]
    ys = [torch.full((1000,), 100.0 * i) for i in range(12)]
    futures = []

    def first(y):
        HOW[how](y)
        return y

    def second(future):
        dist.all_reduce(future.value())
        return future.value()

    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        work = dist.all_reduce(x, async_op=True)
        if late and (i + rank) % 2:
            work.wait()  # on one rank only
        futures.append(work.get_future().then(lambda _, y=y: first(y)).then(second))
    for future in futures:
        future.wait()
    return sum(not torch.equal(y, torch.full((1000,), size * size * 100.0 * i)) for i, y in enumerate(ys))


for how in HOW:
    for late in False, True, False, True:
        assert (wrong := sums(how, late)) == 0, (how, late, wrong)

done, began = threading.Event(), dist.all_reduce(torch.ones(1), async_op=True)
began.get_future().add_done_callback(lambda _: (dist.barrier(), done.set()))
assert done.wait(30)

y = torch.full((1000,), 100.0)
inner = threading.Event()


def begin(_):
    dist.all_reduce(y)
    inner.set()


torch.futures.collect_all([dist.all_reduce(torch.ones(1), async_op=True).get_future()]).then(begin)
xs = [torch.full((1000,), float(i)) for i in range(20)]
for x in xs:
    dist.all_reduce(x)
    time.sleep(0.01 * rank)
assert inner.wait(30)
for i, x in enumerate(xs):
    assert torch.equal(x, torch.full_like(x, size * i)), (i, x)
assert torch.equal(y, torch.full_like(y, size * 100)), y

own = torch.futures.Future()  # of one rank alone, which waits for its file too
futures = [dist.all_reduce(torch.ones(1), async_op=True).get_future(), *[own] * (rank == 0)]
y = torch.full((1000,), 10.0)
both = torch.futures.collect_all(futures).then(begin)
dist.all_reduce(x := torch.ones(1000))
own.set_result(1)
both.wait()
assert torch.equal(y, torch.full_like(y, size * 10)) and torch.equal(x, torch.full_like(x, size)), (x, y)

late, told = torch.zeros(1), threading.Event()
if rank == 0:  # a message that comes late holds up no other callback
    dist.irecv(late, 1).get_future().add_done_callback(lambda _: told.set())
dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda _: None).wait()
dist.barrier()
if rank == 0:
    assert told.wait(30) and late[0] == 1
else:
    dist.send(torch.ones(1), 0)

failing = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda _: 1 / 0)
try:
    failing.then(lambda f: f.value()).wait()
    sys.exit("no error")
except RuntimeError as e:
    assert "ZeroDivisionError" in str(e), e

torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(200, 200), torch.nn.ReLU())]
model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)
model.register_comm_hook(powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
torch.manual_seed(rank)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 200)).pow(2).mean().backward()
    optimizer.step()
own = torch.cat([p.detach().flatten() for p in model.parameters()])
everyones = [torch.empty_like(own) for _ in range(size)]
dist.all_gather(everyones, own)
assert all(torch.equal(one, own) for one in everyones), "PowerSGD: the ranks' models differ"
print(f"rank {rank} is done\n", end="", flush=True)
dist.destroy_process_group()
