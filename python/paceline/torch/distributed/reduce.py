"""Reductions of tensors, whole or each rank its part."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from paceline.common import abi, operators
from paceline.torch._memory import sparse
from paceline.torch.distributed import streams
from paceline.torch.distributed.memory import Memory, summand_of
from paceline.torch.distributed.operations import Operations, Tensors, copied, one_for_each, one_tensor, storing
from paceline.torch.distributed.reductions import BITWISE, Reduction, reduction_of, reductions_of
from paceline.torch.distributed.work import PacelineWork

# Those of sparse tensors.
_SUM, _AVERAGE = Reduction(operators.Sum), Reduction(operators.Average)


class Reductions(Operations):
    """all_reduce, reduce and reduce_scatter."""

    def allreduce(self, tensors: Tensors, options: Any) -> PacelineWork:
        """Reduces a tensor of every rank into it."""
        if tensors[0].is_sparse:
            return self._sparse(tensors, options)
        return self._reduce("all_reduce", tensors, options)

    def allreduce_coalesced(self, tensors: Tensors, options: Any) -> PacelineWork:
        """Reduces several tensors."""
        return self._reduce("all_reduce", tensors, options, coalesced=True)

    def allreduce_sparse(self, tensors: Tensors, options: Any) -> PacelineWork:
        """Reduces sparse tensors, whose elements are gathered, by a sum or an average."""
        return self._sparse(tensors, options)

    def reduce(self, tensors: Tensors, options: Any) -> PacelineWork:
        """Reduces a tensor of every rank into that of the root; the others' stay as they are."""
        return self._reduce("reduce", tensors, options, root=self._peer("reduce", options.rootRank))

    def _reduce(
        self, what: str, tensors: Tensors, options: Any, root: int | None = None, coalesced: bool = False
    ) -> PacelineWork:
        if not coalesced:
            one_tensor(what, tensors)
        group, hows = self._group, reductions_of(options.reduceOp, tensors)
        mine = root is None or root == group.rank
        if hows[0].bitwise is not None:
            return self._bitwise(what, [(t, t, 0) for t in tensors], hows[0], options, mine)
        memory = [Memory(t) for t in tensors]
        outputs = [m.host if mine else torch.empty_like(m.host) for m in memory]

        def one(m: Memory, output: torch.Tensor, how: Reduction) -> abi.Op:
            dtype, count = summand_of(m.tensor)
            where = m.address(), output.data_ptr()
            return group.op(abi.ALLREDUCE, (count,), dtype, *where, reduce_op=how.op, prescale=how.prescale)

        def make() -> abi.Op | list[abi.Op]:
            if not coalesced:
                return one(memory[0], outputs[0], hows[0])
            return [copied(one(*each)) for each in zip(memory, outputs, hows, strict=True)]

        return self._run(what, make, [*memory, *outputs], storing(memory if mine else ()), list(tensors), options)

    def _bitwise(
        self, what: str, slices: list[tuple[torch.Tensor, torch.Tensor, int]], how: Reduction, options: Any, mine: bool
    ) -> PacelineWork:
        """A bitwise reduction of whole tensors, of each of which the output gets the elements from a place on.

        mine: this rank is one that gets them.
        """
        assert how.bitwise is not None
        memory, combine = [Memory(whole) for _, whole, _ in slices], BITWISE[how.bitwise]

        def finish(handles: Any) -> None:
            for (output, _, begin), m, handle in zip(slices, memory, handles, strict=True):
                parts = list(self._given(handle, m.host).values())
                total = parts[0].clone()
                for part in parts[1:]:
                    combine(total, part, out=total)
                if mine:
                    output.detach().copy_(total[begin : begin + output.numel()].view(output.shape))

        def make() -> list[abi.Op]:
            return [copied(self._gather_op(m)) for m in memory]

        return self._run(what, make, memory, finish, [output for output, _, _ in slices], options)

    def _sparse(self, tensors: Tensors, options: Any) -> PacelineWork:
        one_tensor("all_reduce", tensors)
        tensor = tensors[0]
        how = reduction_of(options.reduceOp, tensor)
        if how not in (_SUM, _AVERAGE):
            raise ValueError(
                f"all_reduce of a sparse tensor of {tensor.dtype}: sparse tensors are reduced by ReduceOp.SUM and "
                "ReduceOp.AVG only, and not where they are truth values; make it dense for others (to_dense)"
            )
        part = tensor.detach().coalesce()
        shape = Memory(torch.tensor([part.sparse_dim(), *part.shape], device="cpu"))
        indices, values = Memory(part.indices().t().contiguous()), Memory(part.values())
        stream = None if tensor.is_cpu else torch.accelerator.current_stream(tensor.device)

        def finish(handles: Any) -> None:
            _check_shapes(self._rows(handles[0], shape.host)[0], shape.host)
            all_indices, _ = self._rows(handles[1], indices.host)
            all_values, left = self._rows(handles[2], values.host)
            parts = (sparse(i.t(), v, tensor.shape) for i, v in zip(all_indices, all_values, strict=True))
            with torch.no_grad():  # a detached sparse tensor would keep its own elements
                total = functools.reduce(torch.add, parts)
                tensor.copy_(total if how == _SUM else total / left)
            if stream is not None:  # the elements have new memory, of the stream in which this runs
                streams.use(tensor, stream)

        def make() -> list[abi.Op]:
            return [copied(self._gather_op(m)) for m in (shape, indices, values)]

        return self._run("all_reduce", make, [shape, indices, values], finish, list(tensors), options)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], options: Any) -> PacelineWork:
        """Reduces a list of tensors, one for each rank, of which this rank gets its own."""
        one_tensor("reduce_scatter", outputs)
        parts = one_for_each("reduce_scatter", inputs[0], self._group)
        sizes = [t.numel() for t in parts]
        if sizes[self._group.rank] != outputs[0].numel():
            raise ValueError(
                f"reduce_scatter: an output of {outputs[0].numel()} elements for {sizes[self._group.rank]}"
            )
        if len(set(sizes)) > 1:  # the engine shares rows out evenly
            whole = torch.cat([t.reshape(-1) for t in parts])
            return self._scatter_slice(whole, sizes, outputs[0], options)
        return self._reduce_scatter(
            "reduce_scatter", [(outputs[0], torch.stack([t.reshape(-1) for t in parts]))], options
        )

    def _scatter_slice(self, whole: torch.Tensor, sizes: list[int], output: torch.Tensor, options: Any) -> PacelineWork:
        group, how = self._group, reduction_of(options.reduceOp, whole)
        begin = sum(sizes[: group.rank])
        if how.bitwise is not None:
            return self._bitwise("reduce_scatter", [(output, whole, begin)], how, options, True)
        m = Memory(whole)
        dtype, count = summand_of(whole)

        def finish(_: Any) -> None:
            output.detach().copy_(m.host[begin : begin + sizes[group.rank]].view(output.shape))

        def make() -> abi.Op:
            where = m.address(), m.address()
            return group.op(abi.ALLREDUCE, (count,), dtype, *where, reduce_op=how.op, prescale=how.prescale)

        return self._run("reduce_scatter", make, [m], finish, [output], options)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> PacelineWork:
        """Reduces a tensor of as many equal parts as there are ranks, of which this rank gets its own."""
        return self._reduce_scatter("reduce_scatter_tensor", [(output, input)], options)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any) -> PacelineWork:
        """Several at once."""
        return self._reduce_scatter("reduce_scatter_tensor", list(zip(outputs, inputs, strict=True)), options)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, what: str, pairs: list[tuple[torch.Tensor, torch.Tensor]], options: Any) -> PacelineWork:
        group = self._group
        hows = reductions_of(options.reduceOp, [input for _, input in pairs])
        for output, input in pairs:
            if input.numel() != group.size * output.numel() or input.dtype != output.dtype:
                raise ValueError(
                    f"{what}: input of {input.numel()} elements of {input.dtype} for {group.size} outputs of "
                    f"{output.numel()} elements of {output.dtype}"
                )
        if hows[0].bitwise is not None:
            slices = [(output, input, group.rank * output.numel()) for output, input in pairs]
            return self._bitwise(what, slices, hows[0], options, True)
        memory = [(Memory(output, filled=False), Memory(self._ascending(input))) for output, input in pairs]
        places = [source.place() for _, source in memory]
        for i, (target, own) in enumerate(memory):
            # Sums come while inputs are still sent; what lay in the rank's own part, the usual place, has been by then.
            begin, end = target.place()
            in_place = begin == own.address() + group.rank * target.host.nbytes
            if any(begin < b and a < end for j, (a, b) in enumerate(places) if not (in_place and i == j)):
                target.separate()

        def make() -> list[abi.Op]:
            ops = []
            for (output, input), how in zip(memory, hows, strict=True):
                dtype, count = summand_of(input.tensor)
                where = input.address(), output.address()
                shape = (group.size, count // group.size)
                ops.append(copied(group.op(abi.REDUCESCATTER, shape, dtype, *where, how.op, prescale=how.prescale)))
            return ops

        keep = list(itertools.chain.from_iterable(memory))
        return self._run(what, make, keep, storing([o for o, _ in memory]), [o for o, _ in pairs], options)


def _check_shapes(all_shapes: Sequence[torch.Tensor], own: torch.Tensor) -> None:
    """Raises RuntimeError where a rank's sparse tensor has another shape: one rank's indices are not in another's.

    Each has the number of sparse dimensions before the sizes. Of ranks that are lost there is nothing.
    """
    for rank, shape in enumerate(all_shapes):
        if shape.numel() and not torch.equal(shape, own):
            theirs, ours = (f"{sizes} ({count} sparse)" for count, *sizes in (shape.tolist(), own.tolist()))
            raise RuntimeError(
                f"all_reduce: Sparse dimensions do not match: rank {rank} of the group has a tensor of shape {theirs}, "
                f"this rank of {ours}: give tensors of one shape on all ranks"
            )
