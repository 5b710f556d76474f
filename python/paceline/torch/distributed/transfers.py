"""Transfers of a tensor to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.common import abi
from paceline.torch.distributed.memory import Memory, kind_of
from paceline.torch.distributed.operations import (
    Operations,
    Tensors,
    copied,
    equal_sizes,
    one_for_each,
    one_tensor,
    storing,
)
from paceline.torch.distributed.work import PacelineWork


class Transfers(Operations):
    """broadcast and all_gather."""

    def broadcast(self, tensors: Tensors, options: Any) -> PacelineWork:
        """Sends the root's tensor to all."""
        one_tensor("broadcast", tensors)
        group, root, m = self._group, self._peer("broadcast", options.rootRank), Memory(tensors[0])
        dtype, count = kind_of(m.host)

        def make() -> abi.Op:
            return group.op(abi.BROADCAST, (count,), dtype, m.address(), m.address(), root=root)

        finish = storing(() if root == group.rank else [m])
        return self._run("broadcast", make, [m], finish, list(tensors), options)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> PacelineWork:
        """Gives every rank the tensors of all."""
        one_tensor("all_gather", inputs)
        pair = one_for_each("all_gather", outputs[0], self._group), inputs[0]
        return self._all_gather("all_gather", [pair], options)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, options: Any) -> PacelineWork:
        """Several at once; each list of outputs is one rank's."""
        what = "all_gather_coalesced"
        pairs = [
            (one_for_each(what, [outputs[i] for outputs in output_lists], self._group), t) for i, t in enumerate(inputs)
        ]
        return self._all_gather(what, pairs, options)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> PacelineWork:
        """Gives every rank the tensors of all, one after the other in one tensor."""
        return self._all_gather("all_gather_into_tensor", [(output, input)], options)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any) -> PacelineWork:
        """Several at once."""
        return self._all_gather("all_gather_into_tensor", list(zip(outputs, inputs, strict=True)), options)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, what: str, pairs: list[tuple[Any, torch.Tensor]], options: Any) -> PacelineWork:
        memory = []
        for output, input in pairs:
            size, each = self._group.size, input.numel()
            if isinstance(output, list):
                equal_sizes(what, "outputs", output, each)
            elif output.numel() != size * each:
                raise ValueError(
                    f"{what}: an output of {output.numel()} elements, where {size} ranks give {each} each, "
                    f"{size * each} in all"
                )
            if any(into.dtype != input.dtype for into in (output if isinstance(output, list) else [output])):
                raise ValueError(f"{what}: the outputs are not of {input.dtype}, which each rank gives")
            memory.append(Memory(input))

        def finish(handles: Any) -> None:
            for (output, _), m, handle in zip(pairs, memory, handles, strict=True):
                parts = self._gathered(handle, m.host)
                if isinstance(output, list):
                    outputs = output
                elif output.is_contiguous():
                    outputs = list(output.detach().view(self._group.size, -1))
                else:
                    output.detach().copy_(torch.cat([part.reshape(-1) for part in parts]).view(output.shape))
                    continue
                for part, into in zip(parts, outputs, strict=True):
                    into.detach().copy_(part.view(into.shape))

        def make() -> list[abi.Op]:
            return [copied(self._gather_op(m)) for m in memory]

        outputs = [[o] if isinstance(o, torch.Tensor) else o for o, _ in pairs]
        return self._run(what, make, memory, finish, outputs[0] if len(outputs) == 1 else outputs, options)
