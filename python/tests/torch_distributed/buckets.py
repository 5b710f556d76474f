"""DistributedDataParallel on two ranks, with buckets of 256 KiB: buckets.py BACKEND. Prints the results' bits."""

import hashlib
import sys
import warnings

import by_name  # noqa: F401
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BACKEND = sys.argv[1]
WAYS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "one": {"bucket_cap_mb": 64},
}


def arenas():
    """The addresses of this process's arena, and those of the other rank's, which its server has mapped."""
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if "paceline-arena" in line]
    return [range(int(first, 16), int(last, 16)) for first, last in ranges]


def summed():
    """Where all that the backend sums from now on lies."""
    from paceline.torch.distributed.group import Group, abi

    places, plain = [], Group.op

    def op(self, kind, shape, dtype, input, *more, **options):
        if kind == abi.ALLREDUCE and shape[0] >= 64 << 10:
            places.append(input)
        return plain(self, kind, shape, dtype, input, *more, **options)

    Group.op = op
    return places


def train(way, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256, dtype=dtype) for _ in range(4)])
    ddp = DistributedDataParallel(model, **{"bucket_cap_mb": 0.25} | WAYS[way])
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01, momentum=0.9)
    for step in range(4):
        torch.manual_seed(100 * dist.get_rank() + step)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        x = torch.randn(8, 256, dtype=dtype)
        if step == 2:
            with ddp.no_sync():
                ddp(x).square().mean().backward()
        ddp(x).square().mean().backward()
        optimizer.step()
    whole = torch.cat([t.detach().flatten() for p in model.parameters() for t in (p, p.grad)])
    return hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest(), model


def main():
    warnings.filterwarnings("ignore", "find_unused_parameters")
    dist.init_process_group(BACKEND)
    places = summed() if BACKEND == "paceline" else []
    for way in WAYS:
        for dtype in (torch.float32, torch.bfloat16):
            digest, model = train(way, dtype)
            print(f"rank {dist.get_rank()} {way} {dtype} {digest}\n", end="", flush=True)
    if places:
        within = arenas()
        assert len(places) > 50 and all(any(place in one for one in within) for place in places), places
    before = model[0].weight.grad.clone()
    dist.destroy_process_group()
    assert torch.equal(before, model[0].weight.grad)  # its memory outlives the group


if __name__ == "__main__":
    main()
