"""What the operations of a group have in common.

Roots and peers are ranks of the group, tensors of all ranks have the same size and type unless an operation says
otherwise, and an operation that ranks call differently fails on all of them. What is not in contiguous host memory is
copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.common import abi
from paceline.common.engine import engine
from paceline.torch.distributed import latest
from paceline.torch.distributed.group import Group
from paceline.torch.distributed.memory import Memory, flat, kind_of
from paceline.torch.distributed.work import PacelineWork

Tensors = Sequence[torch.Tensor]


class Operations:
    """The part of a backend that starts operations of its group."""

    _group: Group

    def _run(self, what: str, make: Any, memory: Any, finish: Any, outputs: Any, options: Any) -> PacelineWork:
        return latest.started(self._group.run(what, make, memory, finish, outputs, options))

    def _peer(self, what: str, rank: int) -> int:
        """The rank. Raises ValueError for one that the group does not have."""
        if not 0 <= rank < self._group.size:
            raise ValueError(f"{what}: rank {rank} in a group of {self._group.size} ranks")
        return rank

    def _gather_op(self, m: Memory) -> abi.Op:
        dtype, count = kind_of(m.host)
        return self._group.op(abi.ALLGATHER, (count,), dtype, m.address(), 0)

    def _gathered(self, handle: int, like: torch.Tensor) -> list[torch.Tensor]:
        """The elements from each rank of the group, which brings as many as all others."""
        given = self._given(handle, like)
        if len(given) < self._group.size:
            lost = sorted(set(range(self._group.size)) - set(given))
            raise RuntimeError(
                f"rank {', '.join(map(str, lost))} of group {self._group.name!r} is lost, and what it should give is "
                "needed: use a group of the ranks that are left (torch.distributed.new_group)"
            )
        return list(given.values())

    def _given(self, handle: int, like: torch.Tensor) -> dict[int, torch.Tensor]:
        """As `_gathered`, from those ranks that an elastic job has not lost."""
        memory, rows, left = engine.result(handle)
        if memory is None:
            return {r: like.new_empty(0) for r in range(self._group.size)}
        places = [p for p, n in enumerate(rows) if n or left == self._group.size]
        if len({rows[p] for p in places}) > 1:
            raise RuntimeError(f"the ranks of the group gave tensors of different sizes: {rows} elements or bytes")
        parts = dict(zip(places, flat(memory, like).chunk(len(places)), strict=True))
        return {r: parts[p] for r, p in enumerate(self._group.places) if p in parts}

    def _rows(self, handle: int, like: torch.Tensor) -> tuple[list[torch.Tensor], int]:
        """The rows from each rank of the group, whose numbers may differ; how many ranks are left."""
        memory, counts, left = engine.result(handle)
        _, elements = kind_of(like)
        per = (elements * like.element_size()) // like.nbytes if like.nbytes else 1
        sizes = [c * (1 if per else like.element_size()) for c in counts]
        parts = flat(memory, like).split_with_sizes(sizes)
        return [parts[place].view(-1, *like.shape[1:]) for place in self._group.places], left

    def _ascending(self, whole: torch.Tensor) -> torch.Tensor:
        """Equal parts of a tensor, one for each rank of the group, in the engine's order."""
        if self._group.ordered:
            return whole
        parts = whole.detach().reshape(self._group.size, -1)
        return parts[[self._group.places.index(i) for i in range(self._group.size)]]


def one_tensor(what: str, tensors: Tensors) -> None:
    """Raises ValueError for several."""
    if len(tensors) != 1:
        raise ValueError(f"{what} takes one tensor on each rank, not {len(tensors)}")


def one_for_each(what: str, tensors: Tensors, group: Group) -> list[torch.Tensor]:
    """The tensors, of which there is one for each rank. Raises ValueError for another number."""
    if len(tensors) != group.size:
        raise ValueError(f"{what}: a list of {len(tensors)} tensors for {group.size} ranks")
    return list(tensors)


def equal_sizes(what: str, which: str, tensors: Tensors, each: int) -> None:
    """Raises ValueError where one of the tensors has not as many elements as each rank gives or gets."""
    if any(t.numel() != each for t in tensors):
        raise ValueError(f"{what}: {which} of {[t.numel() for t in tensors]} elements, where each rank has {each}")


def storing(memory: Sequence[Memory]) -> Any:
    """What gives tensors that are copied their results; None where none is."""
    copied = [m for m in memory if m.host is not m.tensor]
    if not copied:
        return None

    def finish(_: Any) -> None:
        for m in copied:
            m.store()

    return finish


def copied(op: abi.Op) -> abi.Op:
    """A copy of what the group uses again for its next operation that is alike."""
    copy = abi.Op.from_buffer_copy(op)
    copy.origin = op  # which has the text and the shape to which it points
    return copy
