"""Measures, over the job's own links, which codec has the shortest exchange for each size of tensor."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from paceline.common.compression import Auto, Codec
from paceline.common.handles import synchronize
from paceline.common.operation import How, Options
from paceline.common.operators import Average, Max
from paceline.common.process_sets import ProcessSet
from paceline.torch._ops import barrier
from paceline.torch._ops_async import reduction, start_group, start_one

SMALLEST, LARGEST, STEP = 4 << 10, 4 << 20, 4  # bytes of the measured tensors; larger ones are cut into such partitions
AT_ONCE = 1 << 20  # bytes in flight together: small tensors overlap, as in training
REPEATS = 3
LONG_S = 0.5  # after an exchange that takes so long, larger sizes are not measured and have its codec
GAIN = 0.95  # a codec must take less than this share of the time of one that loses less


def chosen(auto: Auto, sizes: Sequence[int], process_set: ProcessSet) -> Codec:
    """Rules with the fastest of auto's candidates for each class of sizes. Every rank of the set calls it.

    sizes: bytes of the optimizer's tensors. Ranks measure the same exchanges and compare the slowest rank's times, so
    that all choose the same codecs. Candidates stand in the order of preference; their losses are not measured.
    """
    rules, largest = [], min(max(sizes, default=0), LARGEST)
    size, codec = SMALLEST, auto.candidates[0]
    while size <= max(largest, SMALLEST):
        times = _times(auto.candidates, size, process_set)
        codec = auto.candidates[0]
        best = times[0]
        for candidate, seconds in zip(auto.candidates[1:], times[1:], strict=True):
            if seconds < GAIN * best:
                codec, best = candidate, seconds
        rules.append({"max_bytes": size * STEP // 2, "codec": codec})
        if times[0] > LONG_S:
            break
        size *= STEP
    return Codec(json.dumps([*rules, {"codec": codec}]))


def resolved(codec: Codec | None, groups: Sequence[dict[str, Any]], process_set: ProcessSet) -> str | None:
    """The codec's text; for Auto the rules that are measured for an optimizer's groups; None for the job's setting.

    Called when an optimizer is made, which every rank does: a rank without data may join before its first gradient.
    """
    if not isinstance(codec, Auto):
        return None if codec is None else codec.text
    sizes = [p.numel() * p.element_size() for group in groups for p in group["params"]]
    return chosen(codec, sizes, process_set).text


def _times(candidates: Sequence[str], size: int, process_set: ProcessSet) -> list[float]:
    """Each candidate's seconds for AT_ONCE bytes of tensors of a size, on the slowest rank; the best of REPEATS."""
    # Leaves the program's random numbers and its default device alone.
    numbers = torch.Generator().manual_seed(size)
    tensors = [
        torch.randn(size // 4, generator=numbers, device="cpu", dtype=torch.float32) * 1e-3
        for _ in range(max(AT_ONCE // size, 1))
    ]
    best = torch.full([len(candidates)], torch.inf, dtype=torch.float64, device="cpu")
    for _ in range(REPEATS):
        for i, candidate in enumerate(candidates):
            options = Options(codec=json.dumps([{"min_bytes": 0, "codec": candidate}]))
            how = How(Average, process_set=process_set, options=options)
            parts = [reduction(t, False, f"auto.{size}.{k}.{candidate}", how) for k, t in enumerate(tensors)]
            barrier(process_set)
            began = time.perf_counter()
            synchronize(start_group(parts))
            best[i] = min(float(best[i]), time.perf_counter() - began)
    how = How(Max, process_set=process_set)
    return synchronize(start_one(reduction(best, False, f"auto.{size}", how))).tolist()
