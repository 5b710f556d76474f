"""The operations that return a handle. Arguments, defaults and results are Horovod's.

All but contiguous CPU tensors are copied to host memory and back. In-place forms write the result into the tensor,
whatever its strides and device. Ranks may submit named operations in different orders.

Common errors: ValueError for wrong arguments and for a name that is in flight on this rank; HorovodInternalError for
what Horovod's background thread finds, such as an operator or a shape that the operation does not take, and from
`synchronize`, on every rank, if ranks submitted different shapes, types or operators, if one did not submit in time or
has joined where its data are needed, or if a peer is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from paceline.common import abi
from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError
from paceline.common.handles import start, start_again, synchronize
from paceline.common.operation import How, operation, repeated
from paceline.common.operators import Adasum, Average, Sum, operator_of
from paceline.common.process_sets import ProcessSet, check_process_set, global_process_set, place_in, process_set_number
from paceline.torch._memory import (
    Lent,
    adopt,
    dtype_number,
    host_copy,
    host_view,
    is_direct,
    lent,
    number_if_direct,
    sparse,
    to_device,
)

# Types of tensors that tell how many rows go to each rank; Horovod takes int32 alone.
_SPLITS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Part(NamedTuple):
    """An operation that is ready to start."""

    op: abi.Op
    memory: tuple[Lent, ...]  # that the engine uses until the operation ends
    output: Callable[[int], Any]  # returns the output, given the handle of the finished operation

    def finish(self, handle: int) -> Any:
        """The output. Raises RuntimeError if the program took the memory away meanwhile."""
        for memory in self.memory:
            memory.check()
        return self.output(handle)


def start_one(part: Part, at_once: bool = False) -> int:
    """A handle whose output is one tensor. at_once: the caller waits for it next."""
    return start([part.op], lambda handles: part.finish(handles[0]), at_once)


def start_group(parts: Sequence[Part], at_once: bool = False) -> int:
    """A handle whose output is a tuple of tensors. Raises ValueError for an empty group, as Horovod does."""
    if not parts:
        raise ValueError("a grouped operation needs at least one tensor")
    return start(
        [part.op for part in parts],
        lambda handles: tuple(part.finish(h) for part, h in zip(parts, handles, strict=True)),
        at_once,
    )


def named(tensors: Iterable[torch.Tensor], name: str | None) -> list[tuple[torch.Tensor, str | None]]:
    """The members of a group with their names."""
    return [(tensor, None if name is None else f"{name}.{i}") for i, tensor in enumerate(tensors)]


# What stands before the names of operations other than allreduces. Horovod has it before each name.
_KINDS = {
    abi.ALLGATHER: "allgather",
    abi.BROADCAST: "broadcast",
    abi.ALLTOALL: "alltoall",
    abi.REDUCESCATTER: "reducescatter",
}


def _of_kind(kind: int, name: str | None) -> str | None:
    """The name for the engine, which knows one in flight at a time: operations of two kinds may have the same name."""
    return f"{_KINDS[kind]}.{name}" if name and kind in _KINDS else name


def exchange(kind: int, tensor: torch.Tensor, in_place: bool, reduces: bool, name: str | None, **fields: Any) -> Part:
    """An operation whose output has the shape of its input: allreduce and broadcast."""
    dtype = dtype_number(tensor, reduces=reduces)
    if is_direct(tensor):
        source = tensor
        target = tensor if in_place else torch.empty_like(tensor, requires_grad=False)
    else:
        source = target = host_copy(tensor)

    def output(_: int) -> torch.Tensor:
        if not in_place:
            return to_device(target, like=tensor)
        if source is not tensor:
            tensor.detach().copy_(source, non_blocking=True)
        return tensor

    memory = source.data_ptr(), target.data_ptr()
    op = operation(kind, dtype, tensor.shape, *memory, name=_of_kind(kind, name), **fields)
    return Part(op, lent(source, target), output)


def reduction(
    tensor: torch.Tensor, in_place: bool, name: str | None, how: How, priority: int = 0, empty: bool = False
) -> Part:
    """An allreduce. empty: this rank contributes zeros, which are not sent, and gets the result in tensor."""
    if how.op == Adasum:
        check_process_set(how.process_set)
        if how.process_set.process_set_id != 0:
            raise NotImplementedError("Adasum runs over all ranks: it takes no process set")
    if how.op == Adasum and not tensor.is_floating_point():
        raise HorovodInternalError(f"Adasum combines floating-point tensors, not {tensor.dtype}")
    fields = how.fields()
    return exchange(abi.ALLREDUCE, tensor, in_place, True, name, priority=priority, empty=empty, **fields)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a reduction over all ranks. Returns a handle; its output is a new tensor of the same shape.

    Arguments as of `allreduce`. Raises ValueError for wrong arguments; `synchronize` raises HorovodInternalError, as
    for `allreduce`.
    """
    return start_allreduce(
        tensor, False, name, operator_of(op, average), prescale_factor, postscale_factor, process_set
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a reduction into the tensor itself. Returns a handle; do not use the tensor before the operation ends.

    Shape and arguments as of `allreduce`. Raises ValueError for wrong arguments; `synchronize` raises
    HorovodInternalError, as for `allreduce`.
    """
    return start_allreduce(tensor, True, name, operator_of(op, average), prescale_factor, postscale_factor, process_set)


def start_allreduce(
    tensor: torch.Tensor,
    in_place: bool,
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    at_once: bool = False,
) -> int:
    """Starts an allreduce, with little work where it repeats. at_once: the caller waits for it next."""
    if name is not None and (dtype := number_if_direct(tensor)) is not None:
        what = engine.generation, dtype, tensor.shape, op, prescale, postscale, 0, False
        if (repeat := repeated(process_set_number(process_set), name, what)) is not None:
            memory = tensor.data_ptr()
            if in_place:
                return start_again(repeat, memory, memory, Lent(tensor, True), tensor, at_once)
            output = torch.empty_like(tensor, requires_grad=False)
            return start_again(repeat, memory, output.data_ptr(), Lent(tensor, False), output, at_once)
    return start_one(reduction(tensor, in_place, name, How(op, prescale, postscale, process_set)), at_once)


def grouped_allreduce_async(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts reductions of several tensors together. Returns one handle; its output is a tuple of new tensors.

    Shapes and arguments as of `grouped_allreduce`. Raises ValueError for wrong arguments; `synchronize` raises
    HorovodInternalError, as for `allreduce`.
    """
    how = How(operator_of(op, average), prescale_factor, postscale_factor, process_set)
    return start_group([reduction(t, False, n, how) for t, n in named(tensors, name)])


def grouped_allreduce_async_(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts reductions into several tensors together. Returns one handle; its output is a tuple of the tensors.

    Shapes and arguments as of `grouped_allreduce`. Raises ValueError for wrong arguments; `synchronize` raises
    HorovodInternalError, as for `allreduce`.
    """
    how = How(operator_of(op, average), prescale_factor, postscale_factor, process_set)
    return start_group([reduction(t, True, n, how) for t, n in named(tensors, name)])


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts a reduction of a sparse COO tensor: indices and values are gathered from all ranks.

    Returns a function, as Horovod does: calling it waits and returns the uncoalesced sparse result of the same shape,
    in which equal indices add up. op is Average or Sum.

    Raises NotImplementedError for other operators; the function raises HorovodInternalError, as `allgather` does.
    """
    if op not in (Average, Sum):
        raise NotImplementedError("sparse tensors are reduced by Average or Sum only")
    indices = tensor._indices().t().contiguous()  # one row per element, so that ranks concatenate
    handle = start_group(
        [
            gathering_rows(indices, f"{name}.indices", process_set),
            gathering_rows(tensor._values(), f"{name}.values", process_set),
        ]
    )

    def result() -> torch.Tensor:
        indices, values, ranks = of_both(*synchronize(handle))
        if op == Average:
            values = values / ranks
        return sparse(indices.t(), values, tensor.shape)

    return result


class Gathered(NamedTuple):
    """What an allgather gives."""

    tensor: torch.Tensor
    rows: list[int]  # from each rank of the set
    ranks: int  # of the set that are not lost


def of_both(indices: Gathered, values: Gathered) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The indices and values of those ranks that gave both, and their number. In elastic jobs one may be lost between.

    All ranks that are left have the same of each, and so the same of both.
    """
    if indices.rows == values.rows:
        return indices.tensor, values.tensor, values.ranks
    gave = [i == v for i, v in zip(indices.rows, values.rows, strict=True)]
    parts = [
        torch.cat([part for part, both in zip(torch.split(g.tensor, g.rows), gave, strict=True) if both])
        for g in (indices, values)
    ]
    return parts[0], parts[1], values.ranks - sum(v > 0 for v, both in zip(values.rows, gave, strict=True) if not both)


def gathering(tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> Part:
    """An allgather. Its output is the tensor."""
    part = gathering_rows(tensor, name, process_set)
    return part._replace(output=lambda handle: part.output(handle).tensor)


def gathering_rows(tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> Part:
    """An allgather. Its output is a Gathered."""
    dtype, number = dtype_number(tensor), process_set_number(process_set)
    if tensor.dim() == 0:
        raise HorovodInternalError("allgather joins tensors along the first dimension and a 0-dimensional one has none")
    source = host_view(tensor)

    def output(handle: int) -> Gathered:
        memory, rows, ranks = engine.result(handle)
        whole = to_device(adopt(memory, source.dtype, (sum(rows), *source.shape[1:])), like=tensor)
        return Gathered(whole, rows, ranks)

    name = _of_kind(abi.ALLGATHER, name)
    op = operation(abi.ALLGATHER, dtype, tensor.shape, source.data_ptr(), 0, name=name, process_set=number)
    return Part(op, lent(source), output)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts the concatenation of all ranks' tensors along the first dimension. Returns a handle.

    Its output has the ranks' rows in rank order, in the shape that `allgather` describes with the arguments. Raises
    ValueError for wrong arguments; `synchronize` raises HorovodInternalError, as for `allgather`.
    """
    return start_one(gathering(tensor, name, process_set))


def grouped_allgather_async(
    tensors: Iterable[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts several allgathers together. Returns one handle; its output is a tuple of tensors.

    Shapes and arguments as of `allgather`. Raises ValueError for wrong arguments; `synchronize` raises
    HorovodInternalError, as for `allgather`.
    """
    return start_group([gathering(t, n, process_set) for t, n in named(tensors, name)])


def broadcasting(
    tensor: torch.Tensor, in_place: bool, root_rank: int, name: str | None, process_set: ProcessSet
) -> Part:
    """A broadcast."""
    number = process_set_number(process_set)
    return exchange(abi.BROADCAST, tensor, in_place, False, name, root=root_rank, process_set=number)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a broadcast from root_rank. Returns a handle; its output is a new tensor.

    Shape and arguments as of `broadcast`. Raises ValueError for wrong arguments; `synchronize` raises
    HorovodInternalError, as for `broadcast`.
    """
    return start_one(broadcasting(tensor, False, root_rank, name, process_set))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a broadcast from root_rank into the tensor itself. Returns a handle.

    Shape and arguments as of `broadcast`. Raises ValueError for wrong arguments; `synchronize` raises
    HorovodInternalError, as for `broadcast`.
    """
    return start_one(broadcasting(tensor, True, root_rank, name, process_set))


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts sending slices of the first dimension to each rank. Returns a handle.

    tensor: of shape [rows, ...]; all dimensions but the first are the same on all ranks.
    splits: how many rows go to each rank of the set, in rank order (a tensor or a list of integers); None for equal
        parts. The output is (rows of all ranks in rank order, rows received from each rank). The latter has the type of
        splits if that is a tensor, else int32.

    Raises ValueError if the rows cannot be split so; `synchronize` raises HorovodInternalError, as for `alltoall`.
    """
    dtype, number = dtype_number(tensor), process_set_number(process_set)
    if tensor.dim() == 0:
        raise HorovodInternalError("alltoall shares out the first dimension and a 0-dimensional tensor has none")
    parts = None if splits is None else _integers(splits)
    source = host_view(tensor)

    def output(handle: int) -> tuple[torch.Tensor, torch.Tensor]:
        memory, rows, _ = engine.result(handle)
        received = adopt(memory, source.dtype, (sum(rows), *source.shape[1:]))
        like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")
        return to_device(received, like=tensor), torch.tensor(rows, dtype=like.dtype, device=like.device)

    name = _of_kind(abi.ALLTOALL, name)
    op = operation(abi.ALLTOALL, dtype, tensor.shape, source.data_ptr(), 0, splits=parts, name=name, process_set=number)
    return start_one(Part(op, lent(source), output))


def _integers(splits: Any) -> list[int]:
    """The splits of an alltoall as integers. Raises ValueError where they are none."""
    try:
        if isinstance(splits, torch.Tensor) and splits.dtype not in _SPLITS:
            raise TypeError(f"a tensor of {splits.dtype}")
        given = splits.tolist() if isinstance(splits, torch.Tensor) else list(splits)
        integers = [int(n) for n in given]
        if integers != given:
            raise ValueError(f"{given}")
    except (TypeError, ValueError, OverflowError) as e:
        raise ValueError(f"splits must be integers, one for each rank, got {e}") from None
    if any(abs(n) >= 1 << 63 for n in integers):
        raise ValueError(f"splits {integers}: allowed are 0 to the first dimension")
    return integers


def scattering(tensor: torch.Tensor, name: str | None, how: How) -> Part:
    """A reducescatter."""
    dtype, fields = dtype_number(tensor, reduces=True), how.fields()
    if tensor.dim() == 0:
        raise ValueError("reducescatter shares out the first dimension and a 0-dimensional tensor has none")
    if how.op == Adasum:
        raise HorovodInternalError("reducescatter takes Average, Sum, Min, Max or Product, not Adasum")
    source = host_view(tensor)
    rank, size = place_in(how.process_set)
    share, over = divmod(tensor.shape[0], size)
    target = torch.empty((share + (rank < over), *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")
    memory, name = (source.data_ptr(), target.data_ptr()), _of_kind(abi.REDUCESCATTER, name)
    scatter = operation(abi.REDUCESCATTER, dtype, tensor.shape, *memory, name=name, **fields)
    return Part(scatter, lent(source, target), lambda _: to_device(target, like=tensor))


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reduction of which each rank gets its part of the rows. Returns a handle; they are its output.

    Shapes and arguments as of `reducescatter`. Raises ValueError for wrong arguments; `synchronize` raises
    HorovodInternalError, as for `reducescatter`.
    """
    how = How(operator_of(op, None), prescale_factor, postscale_factor, process_set)
    return start_one(scattering(tensor, name, how))


def grouped_reducescatter_async(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts several reducescatters together. Returns one handle; its output is a tuple of tensors.

    Shapes and arguments as of `reducescatter`. Raises ValueError for wrong arguments; `synchronize` raises
    HorovodInternalError, as for `reducescatter`.
    """
    how = How(operator_of(op, None), prescale_factor, postscale_factor, process_set)
    return start_group([scattering(t, n, how) for t, n in named(tensors, name)])
