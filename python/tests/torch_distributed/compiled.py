"""A model that torch.compile compiles, under DDP or hvd's optimizer: `compiled.py BACKEND WAY LEAVE`.

BACKEND: of torch.distributed, for the ways "around" (the parallel model is compiled, in a program for each bucket) and
"within" (the model is compiled); "hvd" for hvd.DistributedOptimizer. LEAVE: "destroy", or "leave" to end without.
Prints a hash of every bit of the parameters.
"""

import hashlib
import sys

import by_name  # noqa: F401
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

backend, way, leave = sys.argv[1:]
torch.manual_seed(0)
layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def compiled(module):
    return torch.compile(module, backend="aot_eager")  # all of it but the C++ compiler, which not every machine has


if backend == "hvd":
    import paceline.torch as hvd

    hvd.init()
    rank = hvd.rank()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    net = compiled(model)
else:
    torch.distributed.init_process_group(backend)
    rank = torch.distributed.get_rank()
    parallel = {"bucket_cap_mb": 1.2}  # several buckets
    if way == "around":
        net = compiled(DistributedDataParallel(model, **parallel))
    else:
        net = DistributedDataParallel(compiled(model), **parallel)
for step in range(8):
    draw = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(16, 64, generator=draw), torch.randint(10, (16,), generator=draw)
    optimizer.zero_grad()
    cross_entropy(net(x), y).backward()
    optimizer.step()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
sys.stdout.write(f"{digest}\n")  # at once: ranks share the output
sys.stdout.flush()
if leave == "destroy":
    hvd.shutdown() if backend == "hvd" else torch.distributed.destroy_process_group()
