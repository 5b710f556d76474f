"""The operations: outside of programs, under jax.jit, jax.grad and jax.vmap.

Every rank starts the same operations in the same order: a jitted function is a part of the program on every rank, or on
none. In one, shapes are known before it runs: allgather needs the same shape on all ranks, and alltoall equal parts.

Gradients are Horovod's: those of the losses' average over the ranks. Where each rank's loss depends on gathered or
broadcast values, backward averages the ranks' gradients of them. Forward-mode differentiation is not defined.

vmap: the mapped dimension is one more of the arrays; Adasum raises NotImplementedError.

Common errors: ValueError for wrong arguments; HorovodInternalError, on every rank, if ranks gave different shapes,
types or operations, if one did not come in time or has joined where its data are needed, or if a peer is lost. In a
jitted function the latter is jax.errors.JaxRuntimeError with the same message, when its results are used.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from paceline.common import abi
from paceline.common.compression import CompressionArgument, split
from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError, NotInitializedError
from paceline.common.handles import synchronize, watch
from paceline.common.operation import How, c_text
from paceline.common.operators import Adasum, Average, Sum, operator_of
from paceline.common.process_sets import ProcessSet, global_process_set, place_in, process_set_number
from paceline.jax import _host
from paceline.jax._collective import BY_ROWS, Call, collective, put_like, settle
from paceline.jax.compression import Compression

Tree = TypeVar("Tree")
_float0 = jax.dtypes.float0
# The engine has no unsigned types above 8 bits: where bytes only travel, they travel as signed ones.
_SIGNED = {np.dtype(f"uint{bits}"): np.dtype(f"int{bits}") for bits in (16, 32, 64)}


def call_of(kind: int, names: Sequence[str | None], process_set: ProcessSet, **fields: Any) -> Call:
    """A call of this rank. Raises ValueError for a set that is not registered, a wrong name, and before `init()`."""
    if not engine.is_initialized():
        raise NotInitializedError()
    for name in names:
        if name is not None:
            c_text(name)
    number = process_set_number(process_set)
    place, size = place_in(process_set)
    return Call(kind, tuple(names), number, max(place, 0), size, **fields)


def takes_part(process_set: ProcessSet) -> bool:
    """Whether this rank is in the set. Raises ValueError for one that is not registered."""
    process_set_number(process_set)
    return place_in(process_set)[0] >= 0


def names_of(count: int, name: str | None) -> list[str | None]:
    """The names of a group: its name where it has one member."""
    return [None if name is None else name if count == 1 else f"{name}.{i}" for i in range(count)]


def arrays_of(tree: Any, kind: int, what: str) -> tuple[list[jax.Array], Any]:
    """The arrays of a pytree, and its structure. Raises ValueError for a type or a shape that the kind cannot have."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    if not leaves:
        raise ValueError(f"{what} needs at least one array")
    arrays = [_array(leaf, what) for leaf in leaves]
    for array in arrays:
        if kind in BY_ROWS and array.ndim == 0:
            raise ValueError(f"{what} works on rows, and an array without dimensions has none")
        if array.dtype not in _SIGNED or _reduces(kind):
            _host.dtype_number(array.dtype, reduces=_reduces(kind))
    return arrays, structure


def _array(leaf: Any, what: str) -> jax.Array:
    try:
        array = jnp.asarray(leaf)
    except TypeError:
        raise ValueError(f"{what} takes arrays, not {type(leaf).__name__}") from None
    except OverflowError as e:
        raise ValueError(f"{what} of a number that does not fit JAX's integers: {e}; set jax_enable_x64") from None
    # JAX cuts NumPy's integers of 64 bits without a word.
    if (
        isinstance(leaf, np.ndarray | np.generic)
        and leaf.dtype.kind in "iu"
        and (leaf.astype(array.dtype) != leaf).any()
    ):
        raise ValueError(
            f"{what} of numbers that do not fit {array.dtype}, which JAX makes of {leaf.dtype}: set jax_enable_x64"
        )
    return array


def _reduces(kind: int) -> bool:
    return kind in (abi.ALLREDUCE, abi.REDUCESCATTER, abi.ACCUMULATE)


def _exchange(kind: int, tree: Tree, what: str, run: Callable[[list[jax.Array]], Sequence[Any]]) -> Tree:
    """The tree with its arrays exchanged."""
    arrays, structure = arrays_of(tree, kind, what)
    results = run([_as(a, _SIGNED.get(a.dtype, a.dtype)) for a in arrays])
    results = [_as(r, a.dtype) if a.dtype in _SIGNED else r for r, a in zip(results, arrays, strict=True)]
    return jax.tree_util.tree_unflatten(structure, results)


def _as(array: jax.Array, dtype: Any) -> jax.Array:
    """The same bytes under another type."""
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


def _floating(grads: Sequence[Any], backward: Callable[[list[Any]], Sequence[Any]]) -> tuple[Any, ...]:
    """Backward of the gradients that are numbers; integers have gradients without values."""
    real = [g for g in grads if g.dtype != _float0]
    done = iter(backward(real) if real else ())
    return tuple(g if g.dtype == _float0 else next(done) for g in grads)


# Allreduce


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _allreduce(call: Call, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(collective(call, arrays))


def _allreduce_backward(call: Call, _: None, grads: tuple[Any, ...]) -> tuple[Any]:
    """The gradients are reduced the same way."""
    return (_floating(grads, lambda real: _allreduce(call.unnamed(len(real)), tuple(real))),)


_allreduce.defvjp(lambda call, arrays: (_allreduce(call, arrays), None), _allreduce_backward)


def reduction(how: How, names: Sequence[str | None], **fields: Any) -> Call:
    """An allreduce. Raises NotImplementedError for Adasum within a process set."""
    if how.op == Adasum and how.process_set.process_set_id != 0:
        raise NotImplementedError("Adasum runs over all ranks: it takes no process set")
    scales = {"prescale": float(how.prescale), "postscale": float(how.postscale)}
    return call_of(abi.ALLREDUCE, names, how.process_set, op=how.op, options=how.options, **scales, **fields)


def allreduce(
    tensor: Tree,
    average: bool | None = None,
    name: str | None = None,
    compression: CompressionArgument = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tree:
    """Reduces an array, or each array of a pytree, over all ranks. The result has the same shapes and types.

    tensor: an array, or a pytree of arrays, which are exchanged together. What is no array is converted to one.
    op: Average (default), Sum, Adasum, Min, Max or Product. average: deprecated, True for Average and False for Sum.
    prescale_factor, postscale_factor: multiply each rank's array, and the result.
    compression: Compression.fp16 or a compressor of your own, or a codec of the engine, such as
        Compression.topk(0.01) or "int8". Default: PACELINE_COMPRESSION.
    name: identifies the operation on all ranks; the arrays of a pytree are name.0, name.1 and so on. Operations match
        in the order of the program, so that a name matters only for errors, the timeline, patterns of settings, and
        codecs with a residual.
    process_set: the ranks that take part.

    Backward reduces the gradients in the same way. Adasum of integers is an error.

    Raises ValueError for wrong arguments, types and trees without arrays; HorovodInternalError (in a program
    JaxRuntimeError) if ranks gave different shapes, types or operations, or a rank is lost.
    """
    compressor, options = split(compression)
    how = How(operator_of(op, average), prescale_factor, postscale_factor, process_set, options)

    def run(arrays: list[jax.Array]) -> Sequence[Any]:
        if how.op == Adasum and any(not jnp.issubdtype(a.dtype, jnp.floating) for a in arrays):
            raise HorovodInternalError("Adasum combines floating-point arrays")
        compressed = [compressor.compress(a) for a in arrays]
        reduced = _allreduce(reduction(how, names_of(len(arrays), name)), tuple(a for a, _ in compressed))
        return [compressor.decompress(r, ctx) for r, (_, ctx) in zip(reduced, compressed, strict=True)]

    return _exchange(abi.ALLREDUCE, tensor, "allreduce", run)


def grouped_allreduce(
    tensors: Tree,
    average: bool | None = None,
    name: str | None = None,
    compression: CompressionArgument = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tree:
    """Reduces the arrays of a list, or of another pytree, together: `allreduce`, with its shapes, by Horovod's name.

    Raises ValueError for wrong arguments, types and trees without arrays; HorovodInternalError (in a program
    JaxRuntimeError) if ranks gave different shapes, types or operations, or a rank is lost.
    """
    return allreduce(tensors, average, name, compression, op, prescale_factor, postscale_factor, process_set)


# Allgather


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _allgather(call: Call, rows: tuple[int, ...], arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return _allgather_forward(call, rows, arrays)[0]


def _allgather_forward(call: Call, rows: tuple[int, ...], arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    """The results, and where this rank's rows begin in each."""
    if any(isinstance(a, jax.core.Tracer) for a in arrays):
        return tuple(collective(call, arrays)), tuple(n * call.place for n in rows)
    settle()  # ranks may have different numbers of rows, which no program can
    gathered = _host.run(call, [np.asarray(a) for a in arrays], with_rows=True)
    results, counts = gathered[: len(arrays)], gathered[len(arrays) :]
    return tuple(map(put_like, arrays, results)), tuple(int(c[: call.place].sum()) for c in counts)


def _allgather_backward(call: Call, rows: tuple[int, ...], starts: Any, grads: tuple[Any, ...]) -> tuple[Any]:
    """The gradients are averaged and cut to this rank's rows. In a program of its own its starts are arrays."""
    average = dataclasses.replace(call, kind=abi.ALLREDUCE, op=Average)
    results = _floating(grads, lambda real: _allreduce(average.unnamed(len(real)), tuple(real)))
    return (
        tuple(
            np.zeros((n, *g.shape[1:]), _float0) if g.dtype == _float0 else jax.lax.dynamic_slice_in_dim(g, begin, n)
            for g, begin, n in zip(results, starts, rows, strict=True)
        ),
    )


_allgather.defvjp(_allgather_forward, _allgather_backward)


def _gathered(call: Call, arrays: Sequence[Any]) -> tuple[Any, ...]:
    return _allgather(call, tuple(a.shape[0] for a in arrays), tuple(arrays))


def allgather(tensor: Tree, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tree:
    """Concatenates all ranks' arrays along the first dimension, in rank order.

    Arguments are those of `allreduce`. Outside of jax.jit the first dimension of the shape may differ between ranks;
    the others may not. Backward averages the gradients over the ranks, and cuts them to this rank's rows.

    Raises ValueError for wrong arguments, types and trees without arrays; HorovodInternalError (in a program
    JaxRuntimeError) if ranks gave different shapes, types or operations, or a rank is lost.
    """

    def run(arrays: list[jax.Array]) -> Sequence[Any]:
        return _gathered(call_of(abi.ALLGATHER, names_of(len(arrays), name), process_set), arrays)

    return _exchange(abi.ALLGATHER, tensor, "allgather", run)


def grouped_allgather(tensors: Tree, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tree:
    """Allgathers the arrays of a list, or of another pytree, together; shapes as for `allgather`.

    Raises ValueError for wrong arguments, types and trees without arrays; HorovodInternalError (in a program
    JaxRuntimeError) if ranks gave different shapes, types or operations, or a rank is lost.
    """
    return allgather(tensors, name, process_set)


# Broadcast


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _broadcast(call: Call, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(collective(call, arrays))


def _broadcast_backward(call: Call, _: None, grads: tuple[Any, ...]) -> tuple[Any]:
    """The root's gradients are the average over the ranks, the others' are zero."""
    average = dataclasses.replace(call, kind=abi.ALLREDUCE, op=Average, root=0, of_job=True)

    def backward(real: list[Any]) -> Sequence[Any]:
        averaged = _allreduce(average.unnamed(len(real)), tuple(real))
        return averaged if engine.rank() == call.root else [jnp.zeros_like(a) for a in averaged]

    return (_floating(grads, backward),)


_broadcast.defvjp(lambda call, arrays: (_broadcast(call, arrays), None), _broadcast_backward)


def broadcast(
    tensor: Tree, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tree:
    """Returns root_rank's array, or its arrays of a pytree. Shapes and types are the same on all ranks.

    root_rank: a global rank, within a process set too. The other arguments are those of `allreduce`.
    Backward gives the root the average of the gradients, and the others zeros.

    Raises ValueError for wrong arguments, types and trees without arrays; HorovodInternalError (in a program
    JaxRuntimeError) if ranks gave different shapes, types or operations, or a rank is lost.
    """

    def run(arrays: list[jax.Array]) -> Sequence[Any]:
        names = names_of(len(arrays), name)
        return _broadcast(call_of(abi.BROADCAST, names, process_set, root=root_rank), tuple(arrays))

    return _exchange(abi.BROADCAST, tensor, "broadcast", run)


# Alltoall


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _alltoall(call: Call, array: Any) -> Any:
    return collective(call, [array])[0]


_alltoall.defvjp(
    lambda call, array: (_alltoall(call, array), None),
    lambda call, _, grad: _floating([grad], lambda real: [_alltoall(call.unnamed(1), real[0])]),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _alltoall_by(call: Call, splits: tuple[int, ...], array: Any) -> tuple[Any, Any]:
    if isinstance(array, jax.core.Tracer):
        raise ValueError(
            "alltoall with splits within jax.jit or jax.vmap: how many rows come is known only when it runs; "
            "call it outside, or send equal parts (splits=None)"
        )
    settle()
    received, rows = _host.run(call, [np.asarray(array)], splits, with_rows=True)
    return put_like(array, received), jnp.asarray(rows)


def _alltoall_by_forward(call: Call, splits: tuple[int, ...], array: Any) -> tuple[Any, Any]:
    received, rows = _alltoall_by(call, splits, array)
    return (received, rows), (tuple(int(n) for n in rows), array.shape[0])


def _alltoall_by_backward(call: Call, splits: tuple[int, ...], kept: Any, grads: tuple[Any, Any]) -> tuple[Any]:
    """The gradients of the rows are sent back to their ranks; rows that were not sent have zeros."""
    rows, length = kept

    def backward(real: list[Any]) -> Sequence[Any]:
        back, _ = _alltoall_by(call.unnamed(1), tuple(map(int, rows)), real[0])
        return [jnp.concatenate([back, jnp.zeros((int(length) - back.shape[0], *back.shape[1:]), back.dtype)])]

    return _floating(grads[:1], backward)


_alltoall_by.defvjp(_alltoall_by_forward, _alltoall_by_backward)


@overload
def alltoall(
    tensor: Any, splits: None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> jax.Array: ...
@overload
def alltoall(
    tensor: Any, splits: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[jax.Array, jax.Array]: ...
def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Sends slices of an array's first dimension to each rank and returns the slices received, in rank order.

    splits: rows for each rank of the set; None for equal parts. With splits, which jax.jit does not allow, the result
    is (array, rows received from each rank). Only the first dimension of the shape may differ between ranks. Backward
    sends the gradients of the rows back. name and process_set are those of `allreduce`.

    Raises ValueError for wrong arguments, types and trees without arrays; HorovodInternalError (in a program
    JaxRuntimeError) if ranks gave different shapes, types or operations, or a rank is lost.
    """
    if splits is None:

        def run(arrays: list[jax.Array]) -> Sequence[Any]:
            call = call_of(abi.ALLTOALL, names_of(len(arrays), name), process_set)
            if len(arrays) != 1:
                raise ValueError("alltoall takes one array")
            if arrays[0].shape[0] % call.size:
                raise ValueError(
                    f"alltoall cannot share {arrays[0].shape[0]} rows out evenly among {call.size} ranks: give splits"
                )
            return [_alltoall(call, arrays[0])]

        return _exchange(abi.ALLTOALL, tensor, "alltoall", run)
    given = np.asarray(splits)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"splits must be integers, one for each rank, got {splits!r}")
    rows: list[jax.Array] = []

    def run_by(arrays: list[jax.Array]) -> Sequence[Any]:
        call = call_of(abi.ALLTOALL, (name,), process_set)
        received, received_rows = _alltoall_by(call, tuple(int(n) for n in given), arrays[0])
        rows.append(received_rows)
        return [received]

    return _exchange(abi.ALLTOALL, tensor, "alltoall", run_by), rows[0]


# Reducescatter


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _reducescatter(call: Call, rows: tuple[int, ...], arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(collective(call, arrays))


def _reducescatter_backward(call: Call, rows: tuple[int, ...], _: None, grads: tuple[Any, ...]) -> tuple[Any]:
    """All ranks' gradients are gathered, times the set's size if op is Sum, and scaled as the result was."""
    factor = call.prescale * call.postscale * (call.size if call.op == Sum else 1)
    gather = dataclasses.replace(call, kind=abi.ALLGATHER, op=0, prescale=1.0, postscale=1.0)

    def backward(real: list[Any]) -> Sequence[Any]:
        scaled = [g * jnp.asarray(factor, g.dtype) if factor != 1 else g for g in real]
        lengths = [n for n, g in zip(rows, grads, strict=True) if g.dtype != _float0]
        return _allgather_shares(gather.unnamed(len(real)), scaled, lengths)

    return (
        tuple(
            np.zeros((n, *g.shape[1:]), _float0) if g.dtype == _float0 else g
            for g, n in zip(_floating(grads, backward), rows, strict=True)
        ),
    )


def _allgather_shares(call: Call, shares: list[Any], lengths: Sequence[int]) -> list[Any]:
    """Gathers what a reducescatter of so many rows has given each rank: the lower ranks may have one row more."""
    even = [-(-n // call.size) for n in lengths]
    padded = [
        jnp.concatenate([s, jnp.zeros((n - s.shape[0], *s.shape[1:]), s.dtype)])
        for s, n in zip(shares, even, strict=True)
    ]
    whole = []
    for gathered, n, share in zip(_gathered(call, padded), lengths, even, strict=True):
        if gathered.shape[0] != share * call.size:  # what came cannot be told apart then
            raise HorovodInternalError("a rank was lost between forward and backward of a collective")
        own = [n // call.size + (rank < n % call.size) for rank in range(call.size)]
        whole.append(jnp.concatenate([gathered[r * share : r * share + own[r]] for r in range(call.size)]))
    return whole


_reducescatter.defvjp(lambda call, rows, arrays: (_reducescatter(call, rows, arrays), None), _reducescatter_backward)


def reducescatter(
    tensor: Tree,
    name: str | None = None,
    compression: CompressionArgument = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tree:
    """Reduces an array, or each array of a pytree, over all ranks and returns this rank's part of its rows.

    Rows are shared evenly; if their number is no multiple of the ranks', the lower ranks get one more. Shapes are the
    same on all ranks. Backward gathers all ranks' gradients. Adasum is an error. The other arguments are those of
    `allreduce`.

    Raises ValueError for wrong arguments, types and trees without arrays; HorovodInternalError (in a program
    JaxRuntimeError) if ranks gave different shapes, types or operations, or a rank is lost.
    """
    if operator_of(op, None) == Adasum:
        raise HorovodInternalError("reducescatter takes Average, Sum, Min, Max or Product, not Adasum")
    compressor, options = split(compression)
    scales = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}

    def run(arrays: list[jax.Array]) -> Sequence[Any]:
        names = names_of(len(arrays), name)
        call = call_of(abi.REDUCESCATTER, names, process_set, op=op, options=options, **scales)
        compressed = [compressor.compress(a) for a in arrays]
        reduced = _reducescatter(call, tuple(a.shape[0] for a in arrays), tuple(a for a, _ in compressed))
        return [compressor.decompress(r, ctx) for r, (_, ctx) in zip(reduced, compressed, strict=True)]

    return _exchange(abi.REDUCESCATTER, tensor, "reducescatter", run)


def grouped_reducescatter(
    tensors: Tree,
    name: str | None = None,
    compression: CompressionArgument = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tree:
    """Reducescatters the arrays of a list, or of another pytree, together; shapes as for `reducescatter`.

    Raises ValueError for wrong arguments, types and trees without arrays; HorovodInternalError (in a program
    JaxRuntimeError) if ranks gave different shapes, types or operations, or a rank is lost.
    """
    return reducescatter(tensors, name, compression, op, process_set, prescale_factor, postscale_factor)


# Without arrays


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set has called it. Within jax.jit the program waits, at that place.

    Raises ValueError for a set that is not registered, HorovodInternalError if a rank does not come in time or is lost.
    """
    collective(call_of(abi.BARRIER, (None,), process_set), [jnp.zeros((0,), jnp.uint8)])


def join(device: int = -1) -> int:
    """Reports that this rank has no more data, and waits until every rank has joined. Returns the last rank to join.

    Meanwhile it contributes zeros to the other ranks' reductions, which count in averages as in Horovod. Call it
    outside of jax.jit. device: Horovod's argument for the device of these zeros, without effect.

    Raises HorovodInternalError if a rank is lost, or leaves while others have joined.
    """
    settle()
    handle = engine.submit_join()
    return synchronize(watch([handle], lambda: engine.last_to_join(handle)))
