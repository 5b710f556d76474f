"""Exchanges: what goes to each rank is its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.common import abi
from paceline.common.engine import engine
from paceline.torch._memory import host_room
from paceline.torch.distributed.memory import Memory, flat, kind_of
from paceline.torch.distributed.operations import Operations, Tensors, equal_sizes, one_for_each, one_tensor
from paceline.torch.distributed.work import PacelineWork


class Exchanges(Operations):
    """gather, scatter and all_to_all."""

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> PacelineWork:
        """Gives the root the tensors of all."""
        one_tensor("gather", inputs)
        group, root, m = self._group, self._peer("gather", options.rootRank), Memory(inputs[0])
        into = one_for_each("gather", outputs[0], group) if root == group.rank else []
        equal_sizes("gather", "outputs", into, inputs[0].numel())
        dtype, count = kind_of(m.host)
        splits = [count if r == root else 0 for r in range(group.size)]

        def finish(handles: Any) -> None:
            self._receive(handles[0], m.host, into)

        return self._exchange("gather", m, dtype, count, splits, finish, list(into), options)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], options: Any) -> PacelineWork:
        """Gives each rank its own of the root's tensors."""
        one_tensor("scatter", outputs)
        group, root = self._group, self._peer("scatter", options.rootRank)
        output = outputs[0]
        if root == group.rank:
            parts = one_for_each("scatter", inputs[0], group)
            equal_sizes("scatter", "inputs", parts, output.numel())
            m = Memory(torch.cat([t.detach().reshape(-1) for t in parts]))
        else:
            m = Memory(output.new_empty(0))
        dtype, count = kind_of(m.host)
        splits = [count // group.size] * group.size

        def finish(handles: Any) -> None:
            self._receive(handles[0], m.host, [output if r == root else output.new_empty(0) for r in range(group.size)])

        return self._exchange("scatter", m, dtype, count, splits, finish, list(outputs), options)

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any) -> PacelineWork:
        """Gives each rank its own tensor of this rank's, and gets one of each. Sizes may differ."""
        for tensors in (outputs, inputs):
            if len(tensors) != self._group.size:
                raise ValueError(f"all_to_all: {len(tensors)} tensors for {self._group.size} ranks")
        m = Memory(torch.cat([t.detach().reshape(-1) for t in inputs]))
        dtype, count = kind_of(m.host)
        splits = [kind_of(t)[1] for t in inputs]

        def finish(handles: Any) -> None:
            self._receive(handles[0], m.host, outputs)

        return self._exchange("all_to_all", m, dtype, count, splits, finish, list(outputs), options)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        options: Any,
    ) -> PacelineWork:
        """Gives each rank its rows of this rank's, and gets rows of each. Without splits they are shared evenly."""
        gives = _elements("all_to_all_single", input, input_splits, self._group.size)
        gets = _elements("all_to_all_single", output, output_splits, self._group.size)
        m = Memory(input)
        dtype, count = kind_of(m.host)
        unit = count // input.numel() if input.numel() else 1

        def finish(handles: Any) -> None:
            if output.is_contiguous():
                self._receive(handles[0], m.host, output.detach().view(-1).split_with_sizes(gets))
            else:
                into = host_room(output)
                self._receive(handles[0], m.host, into.view(-1).split_with_sizes(gets))
                output.detach().copy_(into)

        splits = [unit * n for n in gives]
        return self._exchange("all_to_all", m, dtype, count, splits, finish, [output], options)

    alltoall_base = all_to_all_single

    def _exchange(
        self, what: str, m: Memory, dtype: int, count: int, splits: list[int], finish: Any, outputs: Any, options: Any
    ) -> PacelineWork:
        """An alltoall: splits has how many elements go to each rank of the group."""
        group = self._group
        if not group.ordered:
            parts = m.host.view(-1).split_with_sizes([m.host.numel() * n // max(count, 1) for n in splits])
            m.move(torch.cat([parts[group.places.index(i)] for i in range(group.size)]))
            splits = [splits[group.places.index(i)] for i in range(group.size)]

        def make() -> abi.Op:
            return group.op(abi.ALLTOALL, (count,), dtype, m.address(), 0, splits=splits)

        return self._run(what, make, [m], finish, outputs, options)

    def _receive(self, handle: int, like: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        """Stores what came from each rank of the group. Raises RuntimeError where it is not as much as expected."""
        memory, rows, _ = engine.result(handle)
        whole = flat(memory, like)
        total = max(sum(rows), 1)
        sizes = [whole.numel() * n // total for n in rows]
        parts = whole.split_with_sizes(sizes)
        for r, output in enumerate(outputs):
            part = parts[self._group.places[r]]
            if part.numel() != output.numel():
                raise RuntimeError(
                    f"rank {r} of the group sent {part.numel()} elements, and {output.numel()} were expected"
                )
            output.detach().copy_(part.view(output.shape))


def _elements(what: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """How many elements go to each rank, or come from it."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(
                f"{what}: Tensor's dim 0 does not divide equally across group size: {rows} rows, {size} ranks"
            )
        return [tensor.numel() // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"{what}: Split sizes doesn't match total dim 0 size: {list(splits)} of {rows} rows, {size} ranks"
        )
    row = tensor.numel() // rows if rows else 0
    return [n * row for n in splits]
