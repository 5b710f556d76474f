"""Operations on NumPy arrays: what JAX's programs do not do themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from paceline.common import abi
from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError
from paceline.common.handles import start, synchronize
from paceline.common.objects import newest
from paceline.common.operation import Held, operation

if TYPE_CHECKING:
    from paceline.jax._collective import Call

Array = np.ndarray[Any, Any]

_NUMBERS = {
    np.dtype(np.uint8): abi.UINT8,
    np.dtype(np.int8): abi.INT8,
    np.dtype(np.int16): abi.INT16,
    np.dtype(np.int32): abi.INT32,
    np.dtype(np.int64): abi.INT64,
    np.dtype(np.float16): abi.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): abi.BFLOAT16,
    np.dtype(np.float32): abi.FLOAT32,
    np.dtype(np.float64): abi.FLOAT64,
    np.dtype(np.bool_): abi.BOOL,
}


def dtype_number(dtype: Any, *, reduces: bool = False) -> int:
    """The engine's number for an element type. Raises ValueError if the operation cannot use it."""
    number = _NUMBERS.get(dtype)
    if number is None or (reduces and number == abi.BOOL):
        raise ValueError(
            f"arrays of type {dtype} cannot be {'reduced' if reduces else 'sent'}: "
            f"convert it first, for example to {'float32' if number is None else 'uint8'}"
        )
    return number


def run(
    call: Call,
    arrays: Sequence[Array],
    splits: Sequence[int] | None = None,
    *,
    with_rows: bool = False,
    compiled: bool = False,
) -> list[Array]:
    """Exchanges the arrays and waits for the results.

    with_rows: of an allgather or alltoall: after the results come the numbers of rows of each from each rank.

    If the call is compiled and the results have other shapes than the program expects, raises HorovodInternalError
    where rows of lost ranks lack, else ValueError.
    """
    sources = [np.asarray(a, order="C") for a in arrays[call.gated :]]
    empty: Any = arrays[0] if call.gated else [False] * len(sources)
    allocated = call.kind in (abi.ALLGATHER, abi.ALLTOALL)  # by the engine
    root = call.root if call.declared_by is None else newest(call.declared_by, call.names[0] or "")
    targets = [None if allocated else np.empty(call.result(a.shape), a.dtype) for a in sources]
    ops = [
        operation(
            call.kind,
            dtype_number(source.dtype),
            source.shape,
            source.ctypes.data if source.size else 0,
            target.ctypes.data if target is not None and target.size else 0,
            reduce_op=call.op,
            process_set=call.process_set,
            root=root,
            priority=call.priority(i),
            splits=splits,
            prescale=call.prescale,
            postscale=call.postscale,
            name=call.names[i],
            options=call.options,
            held=Held(call.use, call.significance, call.group) if call.kind == abi.ACCUMULATE else None,
            empty=bool(empty[i]),
        )
        for i, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]

    def results(handles: Sequence[int]) -> list[Array]:
        if not allocated:
            return [t for t in targets if t is not None]
        fetched = [_fetched(handle, source) for handle, source in zip(handles, sources, strict=True)]
        if compiled:
            for i, (array, rows, ranks) in enumerate(fetched):
                _expect(call, call.names[i], call.result(sources[i].shape), array, rows, ranks)
        counts = [np.array(rows, np.int32) for _, rows, _ in fetched] if with_rows else []
        return [a for a, *_ in fetched] + counts

    return synchronize(start(ops, results, at_once=True))


def _fetched(handle: int, source: Array) -> tuple[Array, list[int], int]:
    """The rows that the engine has received, how many come from each rank, and from how many ranks of an allgather."""
    memory, rows, ranks = engine.result(handle)
    shape = (sum(rows), *source.shape[1:])
    if memory is None:
        return np.empty(shape, source.dtype), rows, ranks
    return np.frombuffer(memory, dtype=source.dtype).reshape(shape), rows, ranks


def _expect(call: Call, name: str | None, shape: tuple[int, ...], array: Array, rows: list[int], ranks: int) -> None:
    """Raises an error where rows of ranks lack, or others came than expected, as bindings/jax/collective.c does."""
    if array.shape == shape:
        return
    if call.kind == abi.ALLGATHER and ranks < len(rows):
        raise HorovodInternalError(
            f"{name or 'allgather'}: this elastic job has lost {len(rows) - ranks} of the {len(rows)} ranks of the "
            f"process set, with the one at place {rows.index(0)}, and the compiled program expects rows of all: call "
            "it outside of jit, or with a process set of the ranks that are left"
        )
    raise ValueError(
        f"{name or 'the operation'}: the ranks' rows have the shape {array.shape} together and the compiled program "
        f"expects {shape}: under jit every rank gives as many rows as the others; call it outside of jit where "
        "ranks differ"
    )
