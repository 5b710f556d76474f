"""The operations. Arguments, defaults and results are Horovod's; they run eagerly and in graphs, and carry gradients.

Tensors may be on any device; on others than CPUs TensorFlow copies them. Variables are read.

Common errors: ValueError for wrong arguments, tf.errors.InvalidArgumentError for what the engine refuses. Where ranks
submitted different shapes, types or operations, if one did not submit in time or a peer is lost:
HorovodInternalError eagerly, tf.errors.UnknownError in a graph, with the same message.

A gradient is that of the losses' average over the ranks: where each rank's loss depends on gathered or broadcast
values, backward averages the ranks' gradients of them.
"""

from __future__ import annotations

import collections
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from paceline.common import abi, core
from paceline.common.compression import split
from paceline.common.core import *
from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError, NotInitializedError
from paceline.common.handles import start, synchronize, watch
from paceline.common.operation import DEFAULTS, How, Options, operation
from paceline.common.operators import Adasum, Average, Sum, operator_of
from paceline.common.process_sets import ProcessSet, global_process_set, place_in, process_set_number
from paceline.common.util import gpu_available as _gpu_available
from paceline.common.util import num_rank_is_power_2
from paceline.tensorflow._glue import asynchronous, job, ops
from paceline.tensorflow.compression import Compression

# fmt: off
__all__ = [
    "Compression",
    "allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast", "broadcast_", "alltoall",
    "reducescatter", "grouped_reducescatter", "join", "barrier",
    "size_op", "rank_op", "local_size_op", "local_rank_op", "process_set_included_op",
    "check_num_rank_power_of_2", "gpu_available", "handle_average_backwards_compatibility",
]
# fmt: on
__all__ += core.__all__

handle_average_backwards_compatibility = operator_of

# The attribute `numbers`, as bindings/tensorflow/collective.c reads it.
_KIND, _REDUCE_OP, _PROCESS_SET, _ROOT, _PRIORITY, _AT_ONCE, _RANK, _SIZE, _PRESCALE, _POSTSCALE = range(10)
_ROUND, _GENERATION, _USE, _SOFT_PARK, _THRESHOLD, _DECAY, _UNNAMED, _COUNT = range(10, 18)


def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _factor(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]


def _numbers(kind: int, how: How, root: int = 0) -> list[int]:
    if not engine.is_initialized():
        raise NotInitializedError
    number, (rank, size) = process_set_number(how.process_set), place_in(how.process_set)
    if how.op == Adasum and number != 0:
        raise NotImplementedError("Adasum runs over all ranks: it takes no process set")
    numbers = [kind, how.op, number, root, 0, 0, rank, size, _bits(how.prescale), _bits(how.postscale)]
    numbers += [0] * (_COUNT - len(numbers))
    return _of_this_job(numbers) if number or kind == abi.REDUCESCATTER else numbers


def _of_this_job(numbers: list[int]) -> list[int]:
    """Has a graph be refused in another job: its size or sets are part of it."""
    numbers[_ROUND], _ = job()
    return numbers


def _label(kind: str, name: str | None, among: int) -> str:
    """The operation's name on all ranks of a process set, "" for one that matches by its order."""
    if name is not None:  # as Horovod's, whose node has another name then
        return name_of_use(name, among, alone=True)
    if tf.executing_eagerly():
        return ""
    graph, names = tf.compat.v1.get_default_graph(), []
    label = graph.unique_name(f"{kind}Among{among}" if among else kind)
    while graph is not None:
        # Numbers at the end count everything that this process has traced, which may differ between ranks.
        names.append(re.sub(r"(_\d+)+$", "", getattr(graph, "name", "graph")))
        graph = getattr(graph, "outer_graph", None)
    return name_of_use("/".join([*reversed(names), label]), among)


def name_of_use(name: str, among: int, alone: bool = False) -> str:
    """The name for one more operation that would have this name in what is being traced: the first one has it.

    Operations in a graph run in any order, so that two of one name would meet each other's on another rank. All ranks
    of a process set, `among`, trace its operations in the same order. A function counts together with those that are
    traced within it, or alone, and anew each time it is traced. Eager operations run one after the other.
    """
    if tf.executing_eagerly():
        return name
    graph, within_session = tf.compat.v1.get_default_graph(), not tf.compat.v1.executing_eagerly_outside_functions()
    while not alone and (outer := getattr(graph, "outer_graph", None)):
        if not (outer.building_function or within_session):
            break
        graph = outer
    uses = getattr(graph, "_paceline_uses", None)
    if uses is None:
        uses = graph._paceline_uses = collections.Counter()
    uses[name, among, alone] += 1
    number = uses[name, among, alone]
    return name if number == 1 else f"{name}.use{number}"


def in_turn(result: Any) -> list[Any]:
    """What the next reduction waits for: nothing, or this one where kernels wait in TensorFlow's threads.

    tf.function would order them too, a graph of TensorFlow 1 does not: two ranks whose only thread waits for different
    tensors would wait for ever.
    """
    return [] if asynchronous or tf.executing_eagerly() else [result]


def _run(operation: Any, kind: str, numbers: Sequence[int], name: str | None, options: Options, **inputs: Any) -> Any:
    numbers = list(numbers)
    numbers[_AT_ONCE] = int(tf.executing_eagerly() or not asynchronous)
    numbers[_UNNAMED] = int(name is None)
    label = _label(kind, name, numbers[_PROCESS_SET])
    texts = {"label": label, "codec": options.codec or "", "sync": options.sync or ""}
    try:
        return operation(numbers=numbers, **texts, **inputs)
    except tf.errors.UnknownError as e:
        raise HorovodInternalError(e.message) from None


def _exchange(tensors: Sequence[tf.Tensor], numbers: Sequence[int], name: str | None, options: Options) -> list[Any]:
    kind = "Allreduce" if numbers[_KIND] == abi.ALLREDUCE else "Broadcast"
    return list(_run(ops.paceline_exchange, kind, numbers, name, options, tensors=list(tensors)))


def _gather(tensors: Sequence[tf.Tensor], numbers: Sequence[int], name: str | None, options: Options) -> list[Any]:
    kind = "Allgather" if numbers[_KIND] == abi.ALLGATHER else "Reducescatter"
    for tensor in tensors:
        if tensor.shape.rank == 0:
            raise ValueError(f"{kind.lower()} works along the first dimension and a 0-dimensional tensor has none")
    results = list(_run(ops.paceline_gather, kind, numbers, name, options, tensors=list(tensors)))
    if not tf.executing_eagerly():
        for tensor, result in zip(tensors, results, strict=True):
            if tensor.shape.rank is not None:
                result.set_shape([_rows(tensor.shape[0], numbers), *tensor.shape[1:]])
    return results


def _rows(rows: int | None, numbers: Sequence[int]) -> int | None:
    """The rows of a result, where they are known before the operation runs."""
    if rows is None or numbers[_KIND] == abi.ALLGATHER:
        return None
    share, over = divmod(rows, numbers[_SIZE])
    return share + (numbers[_RANK] < over)


def _alltoall(
    tensor: tf.Tensor, splits: tf.Tensor, numbers: Sequence[int], name: str | None
) -> tuple[tf.Tensor, tf.Tensor]:
    result, received = _run(ops.paceline_alltoall, "Alltoall", numbers, name, DEFAULTS, tensor=tensor, splits=splits)
    if not tf.executing_eagerly() and tensor.shape.rank is not None:
        result.set_shape([None, *tensor.shape[1:]])
        received.set_shape([numbers[_SIZE]])
    return result, received


def _among(numbers: Sequence[int], kind: int) -> list[int]:
    """An allgather, or an allreduce by Average, among the same ranks."""
    one = _bits(1.0)
    among = [kind, Average, numbers[_PROCESS_SET], 0, 0, 0, numbers[_RANK], numbers[_SIZE], one, one]
    return _of_this_job(among + [0] * (_COUNT - len(among)))


def _dense(op: Any, grads: Sequence[Any]) -> list[tf.Tensor]:
    outputs = op.outputs
    return [tf.zeros_like(o) if g is None else tf.convert_to_tensor(g) for o, g in zip(outputs, grads, strict=True)]


def exchange_changes(
    tensors: Sequence[tf.Tensor],
    names: Sequence[str],
    how: How,
    empty: tf.Tensor,
    significance: tf.Tensor | None = None,
    within: tf.Tensor | None = None,
) -> list[tf.Tensor]:
    """Reduces changes that a gate may withhold, or adds them to values that the servers hold and reads these.

    empty: uint8 for each tensor, 1 for what is withheld. significance, within: of held values, float32 and bool; None
    for tensors that are reduced.
    """
    held, options = significance is not None, how.options
    numbers = _numbers(abi.ACCUMULATE if held else abi.ALLREDUCE, how)
    if held:
        numbers[_ROUND], numbers[_GENERATION] = job()
        numbers[_USE], numbers[_SOFT_PARK] = abi.ADD | abi.READ, int(options.soft_park)
    if options.pull_gate is not None:
        numbers[_THRESHOLD], numbers[_DECAY] = _bits(options.pull_gate.threshold), _bits(options.pull_gate.decay)
    numbers[_AT_ONCE] = 1
    try:
        return list(
            ops.paceline_change(
                numbers=numbers,
                label="\n".join(names),
                codec=options.codec or "",
                sync=options.sync or "",
                empty=empty,
                significance=tf.zeros([]) if significance is None else significance,
                within=tf.constant(False) if within is None else within,
                tensors=list(tensors),
            )
        )
    except tf.errors.UnknownError as e:
        raise HorovodInternalError(e.message) from None


@tf.RegisterGradient("PacelineExchange")
def _exchange_gradient(op: Any, *grads: Any) -> list[Any]:
    numbers = op.get_attr("numbers")
    if numbers[_KIND] == abi.ALLREDUCE:
        options = Options(codec=tf.compat.as_str(op.get_attr("codec"))).of_gradient()
        return _exchange(_dense(op, grads), numbers, None, options)
    averaged = _exchange(_dense(op, grads), _among(numbers, abi.ALLREDUCE), None, DEFAULTS)
    return averaged if engine.rank() == numbers[_ROOT] else [tf.zeros_like(g) for g in averaged]


@tf.RegisterGradient("PacelineGather")
def _gather_gradient(op: Any, *grads: Any) -> list[Any]:
    numbers = op.get_attr("numbers")
    if numbers[_KIND] == abi.REDUCESCATTER:
        factor = _factor(numbers[_PRESCALE]) * _factor(numbers[_POSTSCALE])
        factor *= numbers[_SIZE] if numbers[_REDUCE_OP] == Sum else 1
        scaled = [g * tf.cast(factor, g.dtype) if factor != 1 else g for g in _dense(op, grads)]
        return _gather(scaled, _among(numbers, abi.ALLGATHER), None, DEFAULTS)
    averaged = _exchange(_dense(op, grads), _among(numbers, abi.ALLREDUCE), None, DEFAULTS)
    counts = tf.stack([tf.shape(x, out_type=tf.int64)[0] for x in op.inputs])
    own = tf.concat([[numbers[_RANK]], counts], axis=0)
    everyone = _gather([own[tf.newaxis]], numbers, None, DEFAULTS)[0]  # nobody's row is a lost rank's
    total = tf.stack([tf.shape(g, out_type=tf.int64)[0] for g in averaged])
    with tf.control_dependencies([_all_came(tf.reduce_sum(everyone[:, 1:], axis=0), total)]):
        starts = tf.reduce_sum(everyone[everyone[:, 0] < numbers[_RANK]][:, 1:], axis=0)
    return [g[starts[i] : starts[i] + counts[i]] for i, g in enumerate(averaged)]


def _all_came(rows: tf.Tensor, wanted: tf.Tensor) -> Any:
    """Fails where a rank has been lost since forward: what came cannot be told apart then."""
    return tf.debugging.assert_equal(rows, wanted, "a rank was lost between forward and backward of a collective")


@tf.RegisterGradient("PacelineAlltoall")
def _alltoall_gradient(op: Any, grad: Any, _: Any) -> list[Any]:
    (dense,) = [tf.zeros_like(op.outputs[0])] if grad is None else [tf.convert_to_tensor(grad)]
    back, _ = _alltoall(dense, op.outputs[1], op.get_attr("numbers"), None)
    unsent = tf.shape(op.inputs[0])[0] - tf.shape(back)[0]  # rows beyond the sum of splits were not sent
    rest = tf.zeros(tf.concat([[unsent], tf.shape(back)[1:]], axis=0), back.dtype)
    return [tf.concat([back, rest], axis=0), None]


def dense_tensor(value: Any) -> tf.Tensor:
    """The value as a tensor, tf.IndexedSlices too. Raises TypeError for a tf.RaggedTensor or tf.SparseTensor."""
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise TypeError(
            f"a {type(value).__name__} cannot be exchanged: give its parts, or what its to_tensor() or "
            "tf.sparse.to_dense() returns"
        )
    return tf.convert_to_tensor(value)


def reduce_dense(
    tensors: Sequence[tf.Tensor], name: str | None, how: How, compression: Any, kind: int = abi.ALLREDUCE
) -> list[tf.Tensor]:
    """Reduces dense tensors as one group: an allreduce, or a reducescatter."""
    compressor, options = split(compression)
    given = [compressor.compress(dense_tensor(t)) for t in tensors]
    run = _exchange if kind == abi.ALLREDUCE else _gather
    options = options if how.options is DEFAULTS else how.options
    reduced = run([t for t, _ in given], _numbers(kind, how), name, options)
    return [compressor.decompress(t, ctx) for t, (_, ctx) in zip(reduced, given, strict=True)]


def reduce_sparse(slices: tf.IndexedSlices, name: str | None, how: How, compression: Any) -> tf.IndexedSlices:
    """Gathers the values and indices of all ranks' slices; equal indices add up where they are used."""
    if how.op not in (Average, Sum):
        raise NotImplementedError("tf.IndexedSlices are reduced by Average or Sum only")
    compressor, _ = split(compression)
    values, ctx = compressor.compress(slices.values)
    numbers = _numbers(abi.ALLGATHER, How(0, process_set=how.process_set))
    if engine.setting("elastic"):
        values, indices, size = _gather_at_once(values, slices.indices, numbers, name)
    else:
        values, indices, ones = _gather([values, slices.indices, tf.ones([1])], numbers, name, DEFAULTS)
        size = tf.size(ones)  # a graph may run in jobs of several sizes
    values, scale = compressor.decompress(values, ctx), how.prescale * how.postscale
    if how.op == Average:
        values = _scaled(values, tf.cast(scale, tf.float64) / tf.cast(size, tf.float64))
    elif scale != 1:
        values = _scaled(values, tf.cast(scale, tf.float64))
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _scaled(values: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Of the same type. Integers are scaled in float64 and cut towards zero, as the engine's are."""
    if values.dtype.is_integer:
        return tf.cast(tf.cast(values, tf.float64) * factor, values.dtype)
    return values * tf.cast(factor, values.dtype)


def _gather_at_once(
    values: tf.Tensor, indices: tf.Tensor, numbers: Sequence[int], name: str | None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """All ranks' values and indices, and the number of ranks that gave them. A rank that is lost gave all or nothing.

    The bytes of an index and of its values are one row. Each rank gives one more, of index -1, by which it is counted.
    """
    shape = tf.shape(values)[1:]
    indices = tf.concat([tf.constant([-1], indices.dtype), indices], axis=0)
    values = tf.concat([tf.zeros(tf.concat([[1], shape], axis=0), values.dtype), values], axis=0)
    width = tf.reduce_prod(shape) * values.dtype.size
    rows = tf.reshape(tf.bitcast(values, tf.uint8), tf.stack([tf.shape(values)[0], width]))
    (gathered,) = _gather([tf.concat([tf.bitcast(indices, tf.uint8), rows], axis=1)], numbers, name, DEFAULTS)
    of_index = indices.dtype.size
    all_indices = tf.bitcast(gathered[:, :of_index], indices.dtype)
    of_value = [values.dtype.size] if values.dtype.size > 1 else []  # a bitcast to bytes adds no dimension of one
    data = tf.reshape(gathered[:, of_index:], tf.concat([[tf.shape(gathered)[0]], shape, of_value], axis=0))
    counts = all_indices < 0
    rest = tf.logical_not(counts)
    all_values = tf.boolean_mask(tf.bitcast(data, values.dtype), rest)
    return all_values, tf.boolean_mask(all_indices, rest), tf.math.count_nonzero(counts)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduces a tensor over all ranks and returns a new tensor of the same shape and type. Carries gradients.

    tensor: a dense tensor of numbers, of any shape, the same on all ranks. tf.IndexedSlices are gathered instead: the
        result has the slices of all ranks, divided by their number for Average.
    op: hvd.Average (default), Sum, Adasum, Min, Max or Product. average: deprecated, True for Average, False for Sum.
    prescale_factor, postscale_factor: multiply each rank's tensor, and the result.
    compression: hvd.Compression.fp16 or a Compressor of your own, or a codec of the engine ("topk:0.01").
    name: identifies the operation on all ranks; by default its place in the graph, or the order of eager operations. By
        default it is exact where its codec would keep what it drops for the next one.
    process_set: the ranks that take part. device_dense, device_sparse, ignore_name_scope: Horovod's, without effect.

    Raises TypeError for a tf.RaggedTensor or tf.SparseTensor, ValueError for other wrong arguments,
    tf.errors.InvalidArgumentError for a type that cannot be reduced. Where ranks gave other shapes or types, one gave
    nothing in time or a peer is lost: HorovodInternalError eagerly, tf.errors.UnknownError with it in a graph.
    """
    how = How(operator_of(op, average), prescale_factor, postscale_factor, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        return reduce_sparse(tensor, name, how, compression)
    return reduce_dense([tensor], name, how, compression)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduces several tensors over all ranks together and returns a list of new tensors. Carries gradients.

    tensors: of any shapes and types, as many on all ranks; tf.IndexedSlices in the same places, which are reduced one
        by one, as `allreduce` does. The other arguments are those of `allreduce`.

    Raises what `allreduce` raises.
    """
    how = How(operator_of(op, average), prescale_factor, postscale_factor, process_set)
    reduced = list(tensors)
    sparse = [i for i, t in enumerate(reduced) if isinstance(t, tf.IndexedSlices)]
    dense = [i for i, t in enumerate(reduced) if not isinstance(t, tf.IndexedSlices)]
    before: list[Any] = []
    if dense:
        results = reduce_dense([reduced[i] for i in dense], name, how, compression)
        before = in_turn(results[0])
        for place, i in enumerate(dense):  # tf.function(grouped_allreduce) is autograph's, whose zip may not be strict
            reduced[i] = results[place]
    for i in sparse:
        with tf.control_dependencies(before):
            reduced[i] = reduce_sparse(reduced[i], name and f"{name}.{i}", how, compression)
        before = in_turn(reduced[i])
    return reduced


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenates all ranks' tensors along the first dimension, in rank order. Carries gradients.

    tensor: of shape [rows, ...]. Rows may differ between ranks and may be none; the other dimensions and the type may
        not. The result has shape [sum of rows, ...]; its first dimension is unknown in a graph.
    name, process_set: as of `allreduce`. ignore_name_scope: Horovod's, without effect.

    Raises ValueError for a tensor without dimensions; otherwise as `allreduce` does.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Allgathers several tensors together and returns a list of new tensors. Carries gradients.

    Shapes and arguments as of `allgather`. Raises what that raises.
    """
    numbers = _numbers(abi.ALLGATHER, How(0, process_set=process_set))
    return _gather([dense_tensor(t) for t in tensors], numbers, name, DEFAULTS) if tensors else []


def grouped_broadcast(
    tensors: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[tf.Tensor]:
    """Broadcasts several tensors together and returns a list of new tensors. See `broadcast`."""
    numbers = _numbers(abi.BROADCAST, How(0, process_set=process_set), root_rank)
    return _exchange([dense_tensor(t) for t in tensors], numbers, name, DEFAULTS) if tensors else []


def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gives variables root_rank's values, and returns them. Those of TensorFlow and of Keras may be mixed.

    variables: of any shapes and types; every rank has the same ones, in the same order. In a graph of TensorFlow 1 it
        returns the assignments.

    Raises as `broadcast` does.
    """
    targets = list(variables)
    values = grouped_broadcast([tf.convert_to_tensor(v) for v in targets], root_rank, name, process_set)
    assigned = [v.assign(value) for v, value in zip(targets, values, strict=True)]
    return targets if tf.compat.v1.executing_eagerly_outside_functions() else assigned


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Returns a new tensor with root_rank's values. Carries gradients, which arrive at the root.

    tensor: of any shape and type (bool too), the same on all ranks; the others' values are ignored.
    root_rank: a rank of the job, also with a process_set. name, process_set: as of `allreduce`.

    Raises as `allreduce` does, tf.errors.InvalidArgumentError also for a root that is not in the set.
    """
    return grouped_broadcast([tensor], root_rank, name, process_set)[0]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends slices of the first dimension to each rank and returns the slices received, in rank order.

    tensor: of shape [rows, ...]; all dimensions but the first are the same on all ranks. Carries gradients.
    splits: integers, rows for each rank of the set; None for equal parts of a number of rows that the size divides.
        With splits the result is (tensor, received_splits), and received_splits has splits' type and shape [size].
    name, process_set: as of `allreduce`.

    Raises ValueError for a tensor without dimensions or splits that are no integers, tf.errors.InvalidArgumentError for
    splits that do not fit; otherwise as `allreduce` does.
    """
    numbers = _numbers(abi.ALLTOALL, How(0, process_set=process_set))
    tensor = dense_tensor(tensor)
    if tensor.shape.rank == 0:
        raise ValueError("alltoall shares out the first dimension and a 0-dimensional tensor has none")
    if splits is None:
        return _alltoall(tensor, tf.zeros([0], tf.int64), numbers, name)[0]
    numbers_given = isinstance(splits, (list, tuple)) and all(isinstance(n, int) for n in splits)
    splits = tf.convert_to_tensor(splits, tf.int32 if numbers_given else None)
    if not splits.dtype.is_integer:
        raise ValueError(f"splits must be integers, one for each rank, got {splits.dtype.name}")
    result, received = _alltoall(tensor, tf.cast(splits, tf.int64), numbers, name)
    return result, tf.cast(received, splits.dtype)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces a tensor over all ranks and returns this rank's part of its rows. Carries gradients.

    tensor: of shape [rows, ...], the same on all ranks. Rows are shared evenly; if their number is no multiple of the
        ranks', the lower ranks get one more. The other arguments are those of `allreduce`.

    Raises ValueError for a tensor without dimensions; otherwise as `allreduce` does. A graph that was traced for a job
    of another size is refused: tf.errors.InvalidArgumentError.
    """
    how = How(op, prescale_factor, postscale_factor, process_set)
    return reduce_dense([tensor], name, how, compression, abi.REDUCESCATTER)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    ignore_name_scope: bool = False,
) -> list[tf.Tensor]:
    """Reducescatters several tensors together and returns a list of new tensors. Carries gradients.

    Shapes and arguments as of `reducescatter`. Raises what that raises.
    """
    how = How(op, prescale_factor, postscale_factor, process_set)
    return reduce_dense(tensors, name, how, compression, abi.REDUCESCATTER) if tensors else []


def join(device: int = -1) -> int:
    """Reports that this rank has no more data, and waits until every rank has joined. Returns the last rank to join.

    Meanwhile it contributes zeros to the other ranks' reductions, which count in averages as in Horovod. device:
    Horovod's argument for the device of these zeros, without effect.

    Raises RuntimeError in a graph, HorovodInternalError if a rank is lost, or leaves while others have joined.
    """
    _eagerly("join")
    handle = engine.submit_join()
    job()  # a new generation
    return synchronize(watch([handle], lambda: engine.last_to_join(handle)))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set has called it.

    Raises RuntimeError in a graph, ValueError for a set that is not registered, HorovodInternalError if a rank does not
    come in time or is lost.
    """
    _eagerly("barrier")
    op = operation(abi.BARRIER, abi.UINT8, (0,), 0, 0, process_set=process_set_number(process_set))
    synchronize(start([op], lambda _: None))


def _eagerly(what: str) -> None:
    if not tf.executing_eagerly():
        raise RuntimeError(f"hvd.{what}() runs eagerly only: call it outside of tf.function")


def _when_run(ask: Callable[[], int], name: str | None) -> tf.Tensor:
    result = tf.numpy_function(lambda: np.int32(ask()), [], tf.int32, name=name)
    result.set_shape([])
    return result


def _members(process_set_id: int) -> Sequence[int]:
    if process_set_id == 0:
        return range(engine.size())
    if (ranks := engine.process_sets().get(process_set_id)) is None:
        raise ValueError(f"process set {process_set_id} is not registered")
    return ranks


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks in a process set as an int32 scalar, asked when the graph runs."""
    return _when_run(lambda: len(_members(process_set_id)), name)


def rank_op(name: str | None = None) -> tf.Tensor:
    """This process's rank as an int32 scalar, asked when the graph runs."""
    return _when_run(engine.rank, name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of ranks on this host as an int32 scalar, asked when the graph runs."""
    return _when_run(engine.local_size, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This process's rank on its host as an int32 scalar, asked when the graph runs."""
    return _when_run(engine.local_rank, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this process is in the set and 0 otherwise, an int32 scalar asked when the graph runs."""
    return _when_run(lambda: engine.rank() in _members(process_set_id), name)


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether the number of ranks is a power of two, which Horovod's Adasum needs and Paceline's does not."""
    return num_rank_is_power_2(num_rank)


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Whether TensorFlow sees a GPU."""
    return _gpu_available(ext_base_name, verbose)
