"""DistributedDataParallel with int8 gradients on two ranks: codec.py hook|setting|own. Says whether they end alike."""

import sys
import warnings

import by_name  # noqa: F401
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("paceline")
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2))
model = DistributedDataParallel(network)
alone = dist.new_group([0])
if sys.argv[1] == "hook":
    from paceline.torch.distributed import DDPState, ddp_hook
if dist.get_rank() == 0:  # a model that the other rank does not have
    other = DistributedDataParallel(torch.nn.Linear(64, 2), process_group=alone)
    if sys.argv[1] == "hook":
        other.register_comm_hook(DDPState("int8", other.module.named_parameters(), alone), ddp_hook)
    other(torch.ones(1, 64)).sum().backward()
    assert other.module.weight.grad.sub(1).abs().max() < 0.01
if sys.argv[1] == "hook":
    model.register_comm_hook(DDPState("int8", network.named_parameters()), ddp_hook)
calls = []
with torch.no_grad():  # an evaluation first
    model(torch.zeros(1, 64))
model.eval()(torch.zeros(1, 64))
model.train()
if sys.argv[1] == "own":  # the script's hook wins over the setting

    def average(state, bucket):
        calls.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model.register_comm_hook(None, average)
    assert [w.category for w in warned] == [UserWarning] and "PACELINE_COMPRESSION" in str(warned[0].message), warned
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
x = torch.randn(64, 64)
y = (x[:, 0] > 0).long()
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
hooks = [hook.__name__ for hook, _ in model._comm_hooks]
assert hooks == ["average" if sys.argv[1] == "own" else "ddp_hook"] and bool(calls) == (sys.argv[1] == "own"), hooks
if sys.argv[1] != "own":  # a sparse gradient is averaged as it is
    table = torch.nn.Embedding(50, 64, sparse=True)
    coded = DistributedDataParallel(torch.nn.Sequential(table, torch.nn.Linear(64, 2)))
    if sys.argv[1] == "hook":
        coded.register_comm_hook(DDPState("int8", coded.module.named_parameters()), ddp_hook)
    for _ in range(3):
        coded.zero_grad()
        coded(torch.tensor([3 + dist.get_rank(), 3, 40])).sum().backward()
        given = [torch.empty(50, 64) for _ in range(2)]
        dist.all_gather(given, table.weight.grad.to_dense())
        assert torch.equal(*given) and given[0][[3, 4, 40]].abs().sum(1).all() and not given[0][5:40].any(), given
mine = torch.cat([p.detach().flatten() for p in network.parameters()])
all_ranks = [torch.empty_like(mine) for _ in range(2)]
dist.all_gather(all_ranks, mine)
alike, learns = torch.equal(*all_ranks), losses[-1] < 0.8 * losses[0]
print(f"alike {alike} learns {learns}\n", end="", flush=True)  # one write: the ranks share the output
dist.destroy_process_group()
