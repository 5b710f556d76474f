"""Measures, over the job's own links, which codec has the shortest exchange for each size of tensor."""

from __future__ import annotations

import array
import functools
import json
import random
import time
from collections.abc import Sequence

from paceline.common import abi
from paceline.common.compression import Auto, Codec
from paceline.common.handles import start, synchronize
from paceline.common.operation import How, Options, operation
from paceline.common.operators import Average, Max
from paceline.common.process_sets import ProcessSet, place_in, process_set_number
from paceline.common.seat import seat

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


def check_stays(codec: Codec | None) -> None:
    """Raises ValueError for Auto in a job whose ranks come and go."""
    if isinstance(codec, Auto) and seat.elastic:
        raise ValueError("Compression.auto() in an elastic job: a rank that joins would measure alone; name a codec")


def resolved(codec: Codec | None, sizes: Sequence[int], process_set: ProcessSet) -> str | None:
    """The codec's text; for Auto the rules that are measured for tensors of so many bytes; None for the job's setting.

    Called when an optimizer is made, which every rank does: a rank without data may join before its first gradient.
    Raises ValueError for Auto in an elastic job.
    """
    check_stays(codec)
    if not isinstance(codec, Auto) or place_in(process_set)[0] < 0:
        return None if codec is None else codec.text
    return chosen(codec, sizes, process_set).text


def _times(candidates: Sequence[str], size: int, process_set: ProcessSet) -> list[float]:
    """Each candidate's seconds for AT_ONCE bytes of tensors of a size, on the slowest rank; the best of REPEATS."""
    numbers, each = _numbers(), size // 4
    tensors = [numbers[k * each : (k + 1) * each] for k in range(AT_ONCE // size)] or [numbers * (size // AT_ONCE)]
    best = array.array("d", [float("inf")] * len(candidates))
    for _ in range(REPEATS):
        for i, candidate in enumerate(candidates):
            options = Options(codec=json.dumps([{"min_bytes": 0, "codec": candidate}]))
            how = How(Average, process_set=process_set, options=options)
            barrier = operation(abi.BARRIER, abi.UINT8, (0,), 0, 0, process_set=process_set_number(process_set))
            synchronize(start([barrier], lambda _: None))
            began = time.perf_counter()
            _reduce(tensors, [f"auto.{size}.{k}.{candidate}" for k in range(len(tensors))], how)
            best[i] = min(best[i], time.perf_counter() - began)
    _reduce([best], [f"auto.{size}"], How(Max, process_set=process_set))
    return best.tolist()


@functools.cache
def _numbers() -> array.array[float]:
    """AT_ONCE bytes of numbers like those of gradients, the same on all ranks."""
    draw = random.Random(0).gauss
    return array.array("f", (draw(0, 1e-3) for _ in range(AT_ONCE // 4)))


def _reduce(tensors: Sequence[array.array[float]], names: Sequence[str], how: How) -> None:
    """Reduces in place, and waits."""
    dtypes = {"f": abi.FLOAT32, "d": abi.FLOAT64}
    ops = []
    for tensor, name in zip(tensors, names, strict=True):
        address, length = tensor.buffer_info()
        dtype = dtypes[tensor.typecode]
        ops.append(operation(abi.ALLREDUCE, dtype, (length,), address, address, name=name, **how.fields()))
    synchronize(start(ops, lambda _: tensors))
