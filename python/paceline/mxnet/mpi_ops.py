"""The operations. Arguments, defaults and results are Horovod's.

allreduce, broadcast and reducescatter are operations of MXNet's engine: they return at once, begin when the array is
ready, and what uses the result waits for it. An operation that fails raises mxnet.base.MXNetError there, with the
engine's message, as every failed operation of MXNet does. allgather and alltoall, whose results have a shape that no
rank knows before, wait, and raise HorovodInternalError.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError

from paceline.common import abi
from paceline.common.compression import codec_of
from paceline.common.core import *
from paceline.common.engine import engine, interruptible
from paceline.common.exceptions import NotInitializedError
from paceline.common.handles import start, synchronize
from paceline.common.held import Use
from paceline.common.operation import Held, How, Options, operation
from paceline.common.operators import Adasum, Average, operator_of
from paceline.common.process_sets import ProcessSet, global_process_set, place_in, process_set_number
from paceline.common.sync import BSP, model_of
from paceline.mxnet._glue import end_job, idle, naive, push

_DTYPES = {
    np.dtype(np.uint8): abi.UINT8,
    np.dtype(np.int8): abi.INT8,
    np.dtype(np.int32): abi.INT32,
    np.dtype(np.int64): abi.INT64,
    np.dtype(np.float16): abi.FLOAT16,
    np.dtype(np.float32): abi.FLOAT32,
    np.dtype(np.float64): abi.FLOAT64,
    np.dtype(np.bool_): abi.BOOL,
}
_REDUCES = (abi.ALLREDUCE, abi.REDUCESCATTER, abi.ACCUMULATE)
_CPUS = ("cpu", "cpu_pinned", "cpu_shared")

_KINDS = {
    abi.ALLREDUCE: "allreduce",
    abi.ALLGATHER: "allgather",
    abi.BROADCAST: "broadcast",
    abi.ALLTOALL: "alltoall",
    abi.REDUCESCATTER: "reducescatter",
}

# Operations without a name have one of so many labels each, in turn, so that many can be in flight.
_LABELS = 64
_counts: collections.defaultdict[tuple[int, int, int], Iterator[int]] = collections.defaultdict(itertools.count)


def _fields(kind: int, name: str | None, how: How) -> dict[str, Any]:
    """The fields of an operation that say what is done, and by which ranks match."""
    fields = how.fields() if kind in _REDUCES else {"process_set": process_set_number(how.process_set)}
    if name is not None:
        return fields | {"name": name}
    # Only the set's ranks count its operations, those that join later too.
    counts = _counts[engine.round, process_set_number(how.process_set), kind]
    return fields | {"name": f"mxnet.{_KINDS[kind]}.{next(counts) % _LABELS}", "unnamed": True}


def _check(kind: int, tensor: Any) -> int:
    """The engine's number for the array's type. Raises ValueError for an array that cannot be used."""
    if not isinstance(tensor, mx.nd.NDArray):
        raise ValueError(f"an mxnet.nd.NDArray is needed, not {type(tensor).__name__}")
    if tensor.stype != "default":
        raise ValueError(f"an array of storage type {tensor.stype} cannot be sent: use tostype('default') first")
    number = None if tensor.dtype is None else _DTYPES.get(np.dtype(tensor.dtype))
    if number is None or (kind in _REDUCES and number == abi.BOOL):
        raise ValueError(
            f"arrays of type {np.dtype(tensor.dtype)} cannot be {'reduced' if number else 'sent'}: cast it first"
        )
    if kind in (abi.ALLGATHER, abi.ALLTOALL, abi.REDUCESCATTER) and not tensor.shape:
        raise ValueError("the operation works along the first dimension, and a 0-dimensional array has none")
    return number


def _exchange(
    kind: int,
    tensor: Any,
    output: Any,
    name: str | None,
    priority: int,
    how: How,
    root: int = 0,
    held: Held | None = None,
    empty: bool = False,
) -> None:
    """Has MXNet's engine run an operation into output, which may be the array itself.

    held: of an operation on a held value. empty: zeros take the array's place, and are not sent.
    """
    if not engine.is_initialized():
        raise NotInitializedError
    dtype = _check(kind, tensor)
    if how.op == Adasum and kind == abi.ALLREDUCE and process_set_number(how.process_set) != 0:
        raise NotImplementedError("Adasum runs over all ranks: it takes no process set")
    if tensor.context.device_type not in _CPUS:
        here = tensor.as_in_context(mx.cpu())
        result = here if output is tensor else mx.nd.empty(output.shape, dtype=output.dtype)
        _exchange(kind, here, result, name, priority, how, root, held, empty)
        result.copyto(output)
        return
    if naive or not tensor.size:
        output[:] = _wait(kind, tensor, name, priority, how, root, held=held, empty=empty)
        return
    fields = _fields(kind, name, how) | {"root": root, "priority": priority, "held": held, "empty": empty}
    op = operation(kind, dtype, tensor.shape, 0, 0, **fields)
    source = None if output is tensor else tensor.handle
    if push(op, source, output.handle) != 0:
        raise MXNetError(f"{fields['name']}: MXNet's engine has not taken the operation")


def reduce_(tensor: Any, name: str, priority: int, how: How, empty: bool) -> None:
    """As `allreduce_`, with zeros in the array's place, which are not sent, if empty."""
    _exchange(abi.ALLREDUCE, tensor, tensor, name, priority, how, empty=empty)


def run_held(use: Use, how: How) -> None:
    """Has MXNet's engine run an operation on a parameter that the servers hold."""
    tensor = use.parameter if use.change is None else use.change
    empty = use.change is None and bool(use.held.use & abi.ADD)
    _exchange(abi.ACCUMULATE, tensor, use.parameter, use.name, use.priority, how, use.root, use.held, empty)


def _wait(
    kind: int,
    tensor: Any,
    name: str | None,
    priority: int,
    how: How,
    root: int = 0,
    splits: Sequence[int] | None = None,
    held: Held | None = None,
    empty: bool = False,
) -> Any:
    """Runs an operation on a copy, waits, and returns the result; for alltoall with the rows received."""
    dtype = _check(kind, tensor)
    source = np.ascontiguousarray(tensor.asnumpy()).reshape(tensor.shape)
    target = None if kind in (abi.ALLGATHER, abi.ALLTOALL) else np.empty(_result_shape(kind, tensor, how), source.dtype)
    fields = _fields(kind, name, how) | {"root": root, "priority": priority, "held": held, "empty": empty}
    fields["splits"] = splits
    op = operation(
        kind,
        dtype,
        source.shape,
        source.ctypes.data if source.size else 0,
        target.ctypes.data if target is not None and target.size else 0,
        **fields,
    )

    def result(handles: Sequence[int]) -> Any:
        if target is not None:
            return mx.nd.array(target, tensor.context, target.dtype)
        memory, rows, _ = engine.result(handles[0])
        shape = (sum(rows), *source.shape[1:])
        gathered = (
            np.empty(shape, source.dtype) if memory is None else np.frombuffer(memory, source.dtype).reshape(shape)
        )
        array = mx.nd.array(gathered, tensor.context, source.dtype)
        return (array, mx.nd.array(rows, tensor.context, np.int32)) if kind == abi.ALLTOALL else array

    return synchronize(start([op], result, at_once=True))


def _result_shape(kind: int, tensor: Any, how: How) -> tuple[int, ...]:
    if kind != abi.REDUCESCATTER:
        return tuple(tensor.shape)
    rank, size = place_in(how.process_set)
    share, over = divmod(tensor.shape[0], size)
    return (share + (rank < over), *tensor.shape[1:])


def _new(kind: int, tensor: Any, how: How) -> Any:
    """An array for the result, where the given one is. Raises ValueError for one that cannot be used."""
    _check(kind, tensor)
    return mx.nd.empty(_result_shape(kind, tensor, how), tensor.context, tensor.dtype)


def _options(compression: Any, sync: Any) -> Options:
    codec = None if compression is None else codec_of(compression)
    if compression is not None and codec is None:
        raise ValueError("compression= takes a codec of the engine here, such as Compression.int8()")
    model = BSP() if sync is None else model_of(sync)  # PACELINE_SYNC is the optimizers'
    if model.ahead:
        raise ValueError(
            f"sync={model.setting}: under this model the servers hold parameters, which is DistributedTrainer's; "
            "models that reduce arrays are BSP and DropStragglers"
        )
    return Options(sync=model.declared, codec=getattr(codec, "text", None))


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
    compression: Any = None,
    sync: Any = None,
) -> Any:
    """Returns a new array, the reduction of all ranks' arrays, of the same shape and type as each. Does not wait.

    tensor: a dense NDArray; one that is not on a CPU is copied to it and back.
    op: Average (default), Sum, Adasum, Min, Max or Product. average: deprecated, True for Average and False for Sum.
    name: identifies the operation on all ranks. Operations without one match in the order in which ranks call them, and
        are exact where a codec would keep what it drops for the next one.
    priority: the higher leaves first, as in MXNet.
    prescale_factor, postscale_factor: multiply each rank's array, and the result.
    process_set: the ranks that take part.
    compression: a codec of the engine, such as `Compression.int8()`. sync: a synchronisation model.

    Raises ValueError for wrong arguments, types and sparse arrays; MXNetError, where the result is used, if ranks gave
    different shapes, types or operators, or a rank is lost.
    """
    args = (name, priority, prescale_factor, postscale_factor, process_set, op, compression, sync)
    return grouped_allreduce([tensor], average, *args)[0]


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
    compression: Any = None,
    sync: Any = None,
) -> Any:
    """As `allreduce`, into the array itself, which it returns: its shape and type are the same on all ranks.

    Raises ValueError for wrong arguments, types and sparse arrays; MXNetError, where the result is used, if ranks gave
    different shapes, types or operators, or a rank is lost.
    """
    args = (name, priority, prescale_factor, postscale_factor, process_set, op, compression, sync)
    return grouped_allreduce_([tensor], average, *args)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
    compression: Any = None,
    sync: Any = None,
) -> list[Any]:
    """Returns a list of new arrays of the same shapes, the reductions of several. Each begins when its array is ready.

    name: the arrays are name.0, name.1 and so on. The other arguments are those of `allreduce`.

    Raises ValueError for wrong arguments, types and sparse arrays; MXNetError, where the result is used, if ranks gave
    different shapes, types or operators, or a rank is lost.
    """
    how = How(operator_of(op, average), prescale_factor, postscale_factor, process_set, _options(compression, sync))
    return _reduce(tensors, [_new(abi.ALLREDUCE, t, how) for t in tensors], name, priority, how)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
    compression: Any = None,
    sync: Any = None,
) -> list[Any]:
    """As `grouped_allreduce`, into the arrays themselves, which it returns: shapes are the same on all ranks.

    Raises ValueError for wrong arguments, types and sparse arrays; MXNetError, where the result is used, if ranks gave
    different shapes, types or operators, or a rank is lost.
    """
    how = How(operator_of(op, average), prescale_factor, postscale_factor, process_set, _options(compression, sync))
    return _reduce(tensors, list(tensors), name, priority, how)


def _reduce(tensors: Sequence[Any], outputs: list[Any], name: str | None, priority: int, how: How) -> list[Any]:
    for tensor, output, own in zip(tensors, outputs, _names(name, len(outputs)), strict=True):
        _exchange(abi.ALLREDUCE, tensor, output, own, priority, how)
    return outputs


def _names(name: str | None, count: int) -> list[str | None]:
    """The names of a group: its name where it has one member."""
    return [name if name is None or count == 1 else f"{name}.{i}" for i in range(count)]


def allgather(
    tensor: Any, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the ranks' arrays one after the other along the first dimension, in which alone shapes may differ. Waits.

    Arguments are those of `allreduce`.

    Raises ValueError for wrong arguments, types and sparse arrays; HorovodInternalError if the arrays' other dimensions
    or types differ between ranks, or a rank is lost.
    """
    return _wait(abi.ALLGATHER, tensor, name, priority, How(Average, process_set=process_set))


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """`allgather` of several arrays: a list, each of the shape that its allgather has. Waits for each.

    Raises ValueError for wrong arguments, types and sparse arrays; HorovodInternalError if the arrays' other dimensions
    or types differ between ranks, or a rank is lost.
    """
    return [
        allgather(t, own, priority, process_set) for t, own in zip(tensors, _names(name, len(tensors)), strict=True)
    ]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns a new array, root_rank's, whose shape and type each rank's array has. Does not wait.

    root_rank: a global rank, within a process set too. The other arguments are those of `allreduce`.

    Raises ValueError for wrong arguments, types and sparse arrays; MXNetError, where the result is used, if ranks gave
    different shapes, types or operators, or a rank is lost.
    """
    how = How(Average, process_set=process_set)
    output = _new(abi.BROADCAST, tensor, how)
    _exchange(abi.BROADCAST, tensor, output, name, priority, how, root_rank)
    return output


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As `broadcast`, into the array itself, which it returns: its shape and type are the same on all ranks.

    Raises ValueError for wrong arguments, types and sparse arrays; MXNetError, where the result is used, if ranks gave
    different shapes, types or operators, or a rank is lost.
    """
    how = How(Average, process_set=process_set)
    _exchange(abi.BROADCAST, tensor, tensor, name, priority, how, root_rank)
    return tensor


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends each rank some rows, and returns those received, in rank order. Waits.

    splits: rows for each rank, an NDArray or a list; None: equal parts. With it the result is a pair, with the rows
    received from each rank, an int32 array. Only the first dimension of the shape may differ between ranks. The other
    arguments are those of `allreduce`.

    Raises ValueError for wrong arguments, types and sparse arrays; HorovodInternalError if the arrays' other dimensions
    or types differ between ranks, or a rank is lost.
    """
    if isinstance(splits, mx.nd.NDArray):
        splits = splits.asnumpy().tolist()
    if splits is not None and not isinstance(splits, Iterable):
        raise ValueError(f"splits are numbers of rows, one for each rank, not {splits!r}")
    rows = None if splits is None else list(splits)
    if rows is not None and any(n != int(n) for n in rows):
        raise ValueError(f"splits are numbers of rows, not {rows}")
    how = How(Average, process_set=process_set)
    received = _wait(abi.ALLTOALL, tensor, name, priority, how, splits=rows and [int(n) for n in rows])
    return received if rows is not None else received[0]


def reducescatter(
    tensor: Any,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Returns this rank's rows of the reduction of arrays of one shape: as many each, the first ranks one more.

    Arguments are those of `allreduce`.

    Raises ValueError for wrong arguments, types and sparse arrays; MXNetError, where the result is used, if ranks gave
    different shapes, types or operators, or a rank is lost.
    """
    args = (op, name, priority, process_set, prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], *args)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """`reducescatter` of several arrays: a list, each of the shape that its reducescatter has. Does not wait.

    Raises ValueError for wrong arguments, types and sparse arrays; MXNetError, where the result is used, if ranks gave
    different shapes, types or operators, or a rank is lost.
    """
    how = How(operator_of(op, None), prescale_factor, postscale_factor, process_set)
    outputs = []
    for tensor, own in zip(tensors, _names(name, len(tensors)), strict=True):
        output = _new(abi.REDUCESCATTER, tensor, how)
        _exchange(abi.REDUCESCATTER, tensor, output, own, priority, how)
        outputs.append(output)
    return outputs


def _drain() -> Exception | None:
    """Waits for what MXNet's engine has in flight. Returns what went wrong there, which MXNet then has raised."""
    try:
        mx.nd.waitall()
    except MXNetError as e:
        return e
    return None


def _finish() -> Exception | None:
    """A script that ends without shutdown: what it has pushed is done first, as MXNet does with its own operations."""
    return interruptible(_drain)


def _settle() -> None:
    """Waits for the operations that have been pushed. What went wrong there is raised where results are used."""
    while not idle():
        time.sleep(0.002)  # a wait in C would not see Ctrl-C


engine.before_checkpoint(_settle)
engine.at_shutdown(end_job)
engine.at_exit(_finish, _drain)
