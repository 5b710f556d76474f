"""Whether ranks have the same parameters, after the first steps and every PACELINE_CHECK_PARAMETERS-th.

Each rank fills its own row of a table with hashes, and a sum over all ranks completes it (a rank that has joined has
zeros there). The sum is started after a step and read after the next one, whose gradients came later: no step waits.
"""

from __future__ import annotations

import collections
import ctypes
import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError
from paceline.common.handles import synchronize
from paceline.common.operation import How
from paceline.common.operators import Sum
from paceline.common.process_sets import ProcessSet, place_in, process_set_number
from paceline.torch._memory import host_view
from paceline.torch._ops_async import reduction, start_one

FIRST = 2  # steps with a check each: a broadcast that was forgotten shows in the first
LARGEST = 1 << 15  # elements of the table: with more ranks, several parameters share a hash
COLUMNS = 4096  # of a parameter's elements, for its projection
ROUNDING = 8.0  # units in the last place in each step, added up at random, that are no fault

_CAUSES = (
    "Usual causes: hvd.broadcast_parameters(model.state_dict(), root_rank=0) is missing before training, after a "
    "checkpoint was loaded or after hvd.join(); hvd.broadcast_optimizer_state(optimizer, root_rank=0) is missing; a "
    "rank changes parameters, the learning rate or reduced gradients itself, or skips a step. "
    "PACELINE_CHECK_PARAMETERS=0 turns this check off."
)

# How many optimizers have been checked, by (generation of the engine, process set): their numbers in names. Ranks make
# first steps in the same order, but may make more optimizers than they use.
_checked: collections.Counter[tuple[int, int]] = collections.Counter()


class _Class(NamedTuple):
    """Parameters that share a hash; with few ranks one."""

    names: list[str]
    params: list[torch.Tensor]


class ParameterCheck:
    """The check of one optimizer's parameters."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._begin()
        self._warned = False

    def _begin(self) -> None:
        self._generation = engine.generation
        self._name: str | None = None
        self._steps = 0
        self._started: tuple[int, list[_Class]] | None = None  # handle, and what its table is about

    def stepped(self, params: Callable[[], Mapping[torch.Tensor, str]]) -> None:
        """Ends a step: compares what the step before has started, then starts a check if one is due.

        params: returns the parameters with their names. Raises RuntimeError, which names the parameter and the ranks,
        if ranks differ by more than rounding.
        """
        if self._generation != engine.generation:  # a join or another init: ranks count from there
            self._drop()
            self._begin()
        if self._started is not None:
            handle, classes = self._started
            self._started = None
            self._compare(synchronize(handle), classes)
        self._steps += 1
        every = engine.setting("check_parameters")
        if every and (self._steps <= FIRST or self._steps % every == 0):
            self._start(params())

    def _drop(self) -> None:
        if self._started is not None:
            with suppress(HorovodInternalError):  # it ended with its round
                synchronize(self._started[0])

    def _start(self, params: Mapping[torch.Tensor, str]) -> None:
        if self._name is None:
            number = self._generation, process_set_number(self._process_set)
            self._name = f"check_parameters.{_checked[number]}"
            _checked[number] += 1
        rank, size = place_in(self._process_set)
        classes = _classes(params, (LARGEST // size - 1) // 2)
        table = torch.zeros(size, 1 + 2 * len(classes), dtype=torch.int64, device="cpu")
        table[rank, 0] = 1
        table[rank, 1::2] = torch.tensor([_hash(c.params) for c in classes], dtype=torch.int64, device="cpu")
        projections = [math.fsum(map(_projection, c.params)) for c in classes]
        table[rank, 2::2] = torch.tensor(projections, dtype=torch.float64, device="cpu").view(torch.int64)
        part = reduction(table, True, self._name, How(Sum, process_set=self._process_set), priority=1)
        self._started = start_one(part), classes

    def _compare(self, table: torch.Tensor, classes: Sequence[_Class]) -> None:
        present = [rank for rank, row in enumerate(table[:, 0].tolist()) if row]
        rows = table[present]
        hashes = rows[:, 1::2]
        differing = (hashes != hashes[0]).any(0).nonzero().flatten().tolist()
        if not differing:
            return
        projections = rows[:, 2::2].contiguous().view(torch.float64)
        by = {c: _distance(projections[:, c], classes[c].params) for c in differing}
        allowed = ROUNDING * math.sqrt(self._steps)
        wrong = [c for c in differing if not by[c] <= allowed * max(_precision(p) for p in classes[c].params)]
        if wrong:
            raise RuntimeError(self._described(wrong, hashes, present, classes, by) + _CAUSES)
        if not self._warned:
            self._warned = True
            warnings.warn(
                self._described(differing, hashes, present, classes, by) + "So little is the rounding of "
                "different processors; broadcast_parameters every few thousand steps keeps the ranks together.",
                stacklevel=4,
            )

    def _described(
        self,
        differing: Sequence[int],
        hashes: torch.Tensor,
        present: Sequence[int],
        classes: Sequence[_Class],
        by: Mapping[int, float],
    ) -> str:
        first = differing[0]
        alike: dict[int, list[int]] = {}
        ranks = self._process_set.ranks or present
        for rank, value in zip(present, hashes[:, first].tolist(), strict=True):
            alike.setdefault(value, []).append(ranks[rank])
        groups = sorted(alike.values(), key=lambda group: (-len(group), group))
        names = classes[first].names
        what = repr(names[0]) if len(names) == 1 else f"one of {names[0]!r} to {names[-1]!r}"
        more = sum(len(classes[c].names) for c in differing[1:])
        others = ", and ".join(_ranks(group) for group in groups[1:4])
        return (
            f"after step {self._steps} the ranks have different parameters: {what}"
            f"{f' (and {more} more)' if more else ''} of {others} differs from that of {_ranks(groups[0])}, by "
            f"{by[first]:.2g} of its norm. "
        )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _classes(params: Mapping[torch.Tensor, str], most: int) -> list[_Class]:
    """The parameters with memory of their own, in at most so many classes."""
    dense = [
        (p, name)
        for p, name in params.items()
        if not torch.nn.parameter.is_lazy(p) and p.layout == torch.strided and p.numel()
    ]
    count = min(len(dense), max(most, 1))
    parts = [dense[i * len(dense) // count : (i + 1) * len(dense) // count] for i in range(count)]
    return [_Class([name for _, name in part], [p for p, _ in part]) for part in parts]


def _hash(params: Sequence[torch.Tensor]) -> int:
    """A CRC of the parameters' bytes, in row-major order on the host."""
    value = 0
    for p in params:
        host = host_view(p.detach())
        memory = (ctypes.c_char * (host.numel() * host.element_size())).from_address(host.data_ptr())
        value = zlib.crc32(memory, value)
    return value


def _projection(p: torch.Tensor) -> float:
    """A sum of the parameter's elements with fixed signs: it moves with any change, in proportion."""
    elements = _elements(p)
    whole = elements.numel() // COLUMNS * COLUMNS
    columns = elements[:whole].view(-1, COLUMNS).sum(0)
    rest = elements[whole:]
    columns[: rest.numel()] += rest
    signs = torch.arange(1, COLUMNS + 1, dtype=torch.int64, device=columns.device) * 0x5851F42D4C957F2D >> 63 | 1
    return float((columns.double() * signs).sum())


def _elements(p: torch.Tensor) -> torch.Tensor:
    flat = p.detach().reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def _distance(projections: torch.Tensor, params: Sequence[torch.Tensor]) -> float:
    """How far ranks are apart, relative to the parameters' norm."""
    norm = math.sqrt(math.fsum(float(torch.linalg.vector_norm(_elements(p).float())) ** 2 for p in params))
    apart = float(projections.max() - projections.min())
    return apart / norm if norm > 0 else (math.inf if apart else 0.0)


def _precision(p: torch.Tensor) -> float:
    return torch.finfo(p.dtype).eps if p.is_floating_point() or p.is_complex() else 0.0
