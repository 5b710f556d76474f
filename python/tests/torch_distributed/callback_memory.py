"""Memory and devices in callbacks of futures: callback_memory.py DEVICE, two ranks."""

import sys
import time

import by_name  # noqa: F401
import torch
import torch.distributed as dist

DEVICE = sys.argv[1]
SIZE = 1 << 22 if DEVICE == "cuda" else 1000


def decompressed(values):
    """The sum of tensors that are sent as halves, as of PyTorch's hook fp16_compress_hook. Nobody keeps the halves."""

    def decompress(future):
        if DEVICE == "cuda":
            torch.cuda._sleep(100_000_000)
        return values.copy_(future.value()[0])

    return dist.all_reduce(values.half(), async_op=True).get_future().then(decompress)


dist.init_process_group("paceline")
rank = dist.get_rank()
with torch.Stream(DEVICE) as stream:
    values = torch.full((SIZE,), rank + 1.0, device=DEVICE)
    future = decompressed(values)
    while not future.done():
        time.sleep(0.001)
    others = [torch.full((SIZE,), 7.0, device=DEVICE).half() for _ in range(3)]  # in what is free
    assert future.wait().eq(3).all(), values

last = torch.accelerator.device_count() - 1 if hasattr(torch.accelerator, "device_index") else 0  # not in PyTorch 2.7
torch.accelerator.set_device_index(last)
seen = dist.all_reduce(torch.ones(1, device=f"{DEVICE}:{last}"), async_op=True).get_future()
seen = seen.then(lambda _: torch.accelerator.current_device_index())
seen = seen.then(lambda future: (future.value(), torch.empty(1, device=DEVICE).device.index))
assert seen.wait() == (last, last), seen.wait()
print(f"rank {rank} is done\n", end="", flush=True)
dist.destroy_process_group()
