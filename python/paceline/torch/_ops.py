"""The operations that wait. Those that return new tensors carry gradients, by Horovod's definitions.

A gradient is that of the losses' average over the ranks: where each rank's loss depends on gathered or broadcast
values, backward averages the ranks' gradients of them. Defaults and errors are those of paceline.torch._ops_async.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from paceline.common import abi
from paceline.common.compression import CompressionArgument, split
from paceline.common.engine import engine
from paceline.common.handles import start, synchronize, watch
from paceline.common.operation import How, operation
from paceline.common.operators import Average, Sum, operator_of
from paceline.common.process_sets import ProcessSet, global_process_set, place_in, process_set_number
from paceline.torch._ops_async import (
    alltoall_async,
    broadcast_async,
    broadcast_async_,
    gathering_rows,
    named,
    reduction,
    scattering,
    start_allreduce,
    start_group,
)
from paceline.torch.compression import Compression


class HorovodAllreduce(torch.autograd.Function):
    """Allreduce of several tensors; the gradients are reduced the same way."""

    @staticmethod
    def forward(ctx: Any, names: Sequence[str | None], how: How, *tensors: torch.Tensor) -> Any:
        ctx.how = how._replace(options=how.options.of_gradient())
        parts = [reduction(t, False, n, how) for t, n in zip(tensors, names, strict=True)]
        return synchronize(start_group(parts, at_once=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *HorovodAllreduce.apply([None] * len(grads), ctx.how, *grads)


def _compressed(
    function: type[torch.autograd.Function],
    members: Sequence[tuple[torch.Tensor, str | None]],
    how: How,
    compression: CompressionArgument,
) -> list[torch.Tensor]:
    """The outputs of a reduction of tensors with their names, which are compressed before and decompressed after."""
    compressor, options = split(compression)
    compressed = [compressor.compress(t) for t, _ in members]
    reduced = function.apply([n for _, n in members], how._replace(options=options), *[t for t, _ in compressed])
    return [compressor.decompress(t, ctx) for t, (_, ctx) in zip(reduced, compressed, strict=True)]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: CompressionArgument = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces a tensor over all ranks and returns a new tensor of the same shape and type. Carries gradients.

    tensor: of any shape and type of numbers, the same on all ranks; on a GPU it travels through host memory.
    op: hvd.Average (default), Sum, Adasum, Min, Max or Product. average: deprecated, True for Average, False for Sum.
    prescale_factor, postscale_factor: multiply each rank's tensor, and the result.
    compression: hvd.Compression.fp16 or a Compressor of your own, or a codec of the engine ("topk:0.01").
    name: identifies the operation on all ranks among those of its kind; unnamed ones match in the order of submission.
    process_set: the ranks that take part.

    Raises ValueError for wrong arguments; HorovodInternalError, on every rank, if ranks gave different shapes, types or
    operators, if one gave nothing in time or a peer is lost.
    """
    how = How(operator_of(op, average), prescale_factor, postscale_factor, process_set)
    return _compressed(HorovodAllreduce, [(tensor, name)], how, compression)[0]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces a tensor over all ranks into itself and returns it. Its shape and type are the same on all ranks.

    Arguments as of `allreduce`. Raises ValueError for wrong arguments; HorovodInternalError, on every rank, if ranks
    gave different shapes, types or operators, if one gave nothing in time or a peer is lost.
    """
    reduce_op = operator_of(op, average)
    return synchronize(
        start_allreduce(tensor, True, name, reduce_op, prescale_factor, postscale_factor, process_set, at_once=True)
    )


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: CompressionArgument = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduces several tensors over all ranks together and returns a list of new tensors. Carries gradients.

    tensors: of any shapes and types, the same on all ranks; the results have them too. The other arguments are those of
        `allreduce`; a name is that of the group.

    Raises ValueError for wrong arguments; HorovodInternalError, on every rank, if ranks gave different shapes, types or
    operators, if one gave nothing in time or a peer is lost.
    """
    how = How(operator_of(op, average), prescale_factor, postscale_factor, process_set)
    return _compressed(HorovodAllreduce, named(tensors, name), how, compression)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduces several tensors over all ranks into themselves and returns a tuple of them.

    Shapes and types are the same on all ranks. Arguments as of `grouped_allreduce`. Raises ValueError for wrong
    arguments; HorovodInternalError, on every rank, if ranks gave different shapes, types or operators, if one gave
    nothing in time or a peer is lost.
    """
    how = How(operator_of(op, average), prescale_factor, postscale_factor, process_set)
    parts = [reduction(t, True, n, how) for t, n in named(tensors, name)]
    return synchronize(start_group(parts, at_once=True))


class HorovodAllgather(torch.autograd.Function):
    """Allgather of several tensors; each gradient is averaged and cut to this rank's rows."""

    @staticmethod
    def forward(ctx: Any, names: Sequence[str | None], process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        parts = [gathering_rows(t, n, process_set) for t, n in zip(tensors, names, strict=True)]
        gathered = synchronize(start_group(parts))
        ctx.how = [g.rows for g in gathered], process_set
        return tuple(g.tensor for g in gathered)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows_of_each, process_set = ctx.how
        averaged = grouped_allreduce(grads, op=Average, process_set=process_set)
        rank, _ = place_in(process_set)
        mine = [t.narrow(0, sum(rows[:rank]), rows[rank]) for t, rows in zip(averaged, rows_of_each, strict=True)]
        return None, None, *mine


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates all ranks' tensors along the first dimension, in rank order. Carries gradients.

    tensor: of shape [rows, ...]. Rows may differ between ranks and may be none; the other dimensions and the type may
        not. The result has shape [sum of rows, ...].
    name, process_set: as of `allreduce`.

    Raises ValueError for wrong arguments; HorovodInternalError, on every rank, if ranks gave different shapes, types or
    operators, if one gave nothing in time or a peer is lost.
    """
    return HorovodAllgather.apply([name], process_set, tensor)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Allgathers several tensors together and returns a tuple of new tensors. Carries gradients.

    Shapes and arguments as of `allgather`. Raises ValueError for wrong arguments; HorovodInternalError, on every rank,
    if ranks gave different shapes, types or operators, if one gave nothing in time or a peer is lost.
    """
    members = named(tensors, name)
    return HorovodAllgather.apply([n for _, n in members], process_set, *[t for t, _ in members])


class HorovodBroadcast(torch.autograd.Function):
    """Broadcast; the root's gradient is the average over the ranks, the others' is zero."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.how = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        root_rank, process_set = ctx.how
        averaged = allreduce(grad, op=Average, process_set=process_set)
        return averaged if engine.rank() == root_rank else torch.zeros_like(averaged), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns a new tensor with root_rank's values. Carries gradients, which arrive at the root.

    tensor: of any shape and type, the same on all ranks; the others' values are ignored.
    root_rank: a rank of the job, also with a process_set. name, process_set: as of `allreduce`.

    Raises ValueError for wrong arguments; HorovodInternalError, on every rank, if ranks gave different shapes, types or
    operators, if one gave nothing in time or a peer is lost.
    """
    return HorovodBroadcast.apply(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Fills the tensor with root_rank's values and returns it. Its shape and type are the same on all ranks.

    Arguments as of `broadcast`. Raises ValueError for wrong arguments; HorovodInternalError, on every rank, if ranks
    gave different shapes, types or operators, if one gave nothing in time or a peer is lost.
    """
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


class HorovodAlltoall(torch.autograd.Function):
    """Alltoall; the gradients of the rows are sent back to their ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        splits: torch.Tensor | Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        received, received_splits = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.how = received_splits, tensor.shape[0], process_set
        if splits is None:
            return received
        ctx.mark_non_differentiable(received_splits)
        return received, received_splits

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        received_splits, rows, process_set = ctx.how
        back, _ = alltoall(grad, splits=received_splits, process_set=process_set)
        unsent = rows - back.shape[0]  # rows beyond the sum of splits were not sent
        return torch.cat([back, back.new_zeros(unsent, *back.shape[1:])]) if unsent else back, None, None, None


@overload
def alltoall(
    tensor: torch.Tensor, splits: None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor: ...
@overload
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends slices of the first dimension to each rank and returns the slices received, in rank order.

    tensor: of shape [rows, ...]; all dimensions but the first are the same on all ranks. Carries gradients.
    splits: rows for each rank of the set, integers; None for equal parts of a number of rows that the size divides.
        With splits the result is (tensor, received_splits), and received_splits has shape [size].
    name, process_set: as of `allreduce`.

    Raises ValueError for wrong arguments; HorovodInternalError, on every rank, if ranks gave different shapes, types or
    operators, if one gave nothing in time or a peer is lost.
    """
    return HorovodAlltoall.apply(tensor, splits, name, process_set)


class HorovodReducescatter(torch.autograd.Function):
    """Reducescatter of several tensors; all ranks' gradients are gathered, times the set's size if op is Sum."""

    @staticmethod
    def forward(ctx: Any, names: Sequence[str | None], how: How, *tensors: torch.Tensor) -> Any:
        ctx.how = how
        parts = [scattering(t, n, how) for t, n in zip(tensors, names, strict=True)]
        return synchronize(start_group(parts, at_once=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        how = ctx.how
        factor = how.prescale * how.postscale * (place_in(how.process_set)[1] if how.op == Sum else 1)
        scaled = [grad * factor if factor != 1 else grad for grad in grads]  # as the result was
        return None, None, *grouped_allgather(scaled, process_set=how.process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: CompressionArgument = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces a tensor over all ranks and returns this rank's part of its rows. Carries gradients.

    tensor: of shape [rows, ...], the same on all ranks. Rows are shared evenly; if their number is no multiple of the
        ranks', the lower ranks get one more. The other arguments are those of `allreduce`.

    Raises ValueError for wrong arguments; HorovodInternalError, on every rank, if ranks gave different shapes, types or
    operators, if one gave nothing in time or a peer is lost.
    """
    how = How(operator_of(op, None), prescale_factor, postscale_factor, process_set)
    return _compressed(HorovodReducescatter, [(tensor, name)], how, compression)[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: CompressionArgument = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reducescatters several tensors together and returns a list of new tensors. Carries gradients.

    Shapes and arguments as of `reducescatter`. Raises ValueError for wrong arguments; HorovodInternalError, on every
    rank, if ranks gave different shapes, types or operators, if one gave nothing in time or a peer is lost.
    """
    how = How(operator_of(op, None), prescale_factor, postscale_factor, process_set)
    return _compressed(HorovodReducescatter, named(tensors, name), how, compression)


def join(device: int = -1) -> int:
    """Reports that this rank has no more data, and waits until every rank has joined. Returns the last rank to join.

    Meanwhile it contributes zeros to the other ranks' reductions, which count in averages as in Horovod. device:
    Horovod's argument for the device of these zeros, without effect.

    Raises HorovodInternalError if a rank is lost, or leaves while others have joined.
    """
    handle = engine.submit_join()
    return synchronize(watch([handle], lambda: engine.last_to_join(handle)))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set has called it.

    Raises ValueError for a set that is not registered, HorovodInternalError if a rank does not come in time or is lost.
    """
    op = operation(abi.BARRIER, abi.UINT8, (0,), 0, 0, process_set=process_set_number(process_set))
    synchronize(start([op], lambda _: None))
