"""Messages between two ranks beside PyTorch's Gloo: `paceline run -np 2 python bench/messages.py`.

A message goes to the other rank and one of the same length comes back, with blocking calls; a repetition is so many of
these in a row, and Paceline and Gloo alternate. Printed is the time of one message, half of that of the two, its median
and p10 to p90, and the ratio of Gloo's time to Paceline's in adjacent repetitions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import paceline.torch as hvd
from paceline.common import messages


def paceline_turn(tensor: torch.Tensor, there: torch.Tensor, rank: int) -> None:
    """A message there and one back, by Paceline."""

    def send() -> None:
        messages.send(tensor.data_ptr(), tensor.nbytes, 1 - rank, 1, keep=tensor).wait()

    def recv() -> None:
        messages.recv(there.data_ptr(), there.nbytes, 1 - rank, 1, keep=there).wait()

    for step in (send, recv) if rank == 0 else (recv, send):
        step()


def gloo_turn(tensor: torch.Tensor, there: torch.Tensor, rank: int) -> None:
    """The same by Gloo."""
    steps: tuple[Callable[[], object], ...] = (lambda: dist.send(tensor, 1 - rank), lambda: dist.recv(there, 1 - rank))
    for step in steps if rank == 0 else reversed(steps):
        step()


def contents(in_a_row: int, bytes_: int, rank: int) -> torch.Tensor:
    """The messages of a rank, one per row: random, so that each differs from all others and from zeros."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(256, (in_a_row, bytes_), dtype=torch.uint8, generator=generator)


def measure(bytes_: int, repetitions: int, rank: int) -> dict[str, object]:
    """The times of a message of so many bytes, in seconds."""
    in_a_row = max(1, min(200, (64 << 20) // bytes_ // 8))
    tensors, wanted = contents(in_a_row, bytes_, rank), contents(in_a_row, bytes_, 1 - rank)
    there = torch.empty_like(wanted)
    rows = list(zip(tensors, there, strict=True))
    times: dict[str, list[float]] = {"paceline": [], "gloo": []}
    for repetition in range(repetitions + 2):
        for name, turn in (("paceline", paceline_turn), ("gloo", gloo_turn))[:: 1 if repetition % 2 else -1]:
            there.zero_()
            dist.barrier()
            start = time.perf_counter()
            for tensor, place in rows:
                turn(tensor, place, rank)
            if repetition >= 2:
                times[name].append((time.perf_counter() - start) / in_a_row / 2)
            if not torch.equal(there, wanted):
                raise RuntimeError(f"{name} brings other bytes")
    ratios = sorted(g / p for g, p in zip(times["gloo"], times["paceline"], strict=True))
    result: dict[str, object] = {"bytes": bytes_, "ratio": statistics.median(ratios)}
    for name, all_ in times.items():
        spread = statistics.quantiles(all_, n=10)
        result[name] = {"median": statistics.median(all_), "p10": spread[0], "p90": spread[-1]}
    return result


def main() -> None:
    """Measures on this rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, nargs="+", default=[4 << 10, 64 << 10, 1 << 20, 64 << 20])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size())
    results = [measure(n, options.repetitions, hvd.rank()) for n in options.bytes]
    if hvd.rank() == 0:
        for r in results:
            print(
                f"{r['bytes']:>9} bytes: paceline {r['paceline']['median'] * 1e6:9.1f} us"  # type: ignore[index]
                f", gloo {r['gloo']['median'] * 1e6:9.1f} us, ratio {r['ratio']:.2f}"  # type: ignore[index]
            )
        if options.json:
            with open(options.json, "w") as file:
                json.dump(results, file, indent=1)
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
