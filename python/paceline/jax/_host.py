"""Operations on NumPy arrays: what JAX's programs do not do themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from paceline.common import abi
from paceline.common.engine import engine
from paceline.common.handles import start, synchronize
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


def run(call: Call, arrays: Sequence[Array], splits: Sequence[int] | None = None) -> list[Array]:
    """Exchanges the arrays and waits for the results. For alltoall with splits also returns the rows received."""
    sources = [np.asarray(a, order="C") for a in arrays[call.gated :]]
    empty: Any = arrays[0] if call.gated else [False] * len(sources)
    allocated = call.kind in (abi.ALLGATHER, abi.ALLTOALL)  # by the engine
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
            root=call.root,
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
        return [a for a, _ in fetched] + ([np.array(fetched[0][1], np.int32)] if splits is not None else [])

    return synchronize(start(ops, results, at_once=True))


def _fetched(handle: int, source: Array) -> tuple[Array, list[int]]:
    """The rows that the engine has received, and how many come from each rank."""
    memory, rows, _ = engine.result(handle)
    shape = (sum(rows), *source.shape[1:])
    if memory is None:
        return np.empty(shape, source.dtype), rows
    return np.frombuffer(memory, dtype=source.dtype).reshape(shape), rows
