"""Python objects between ranks, for frameworks whose tensors they need not become."""

from __future__ import annotations

import ctypes
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from paceline.common import abi
from paceline.common.engine import engine
from paceline.common.handles import start, synchronize
from paceline.common.operation import Options, operation
from paceline.common.operators import Max
from paceline.common.process_sets import ProcessSet, global_process_set, process_set_number

# What is unpickled, and its length, is authenticated on every connection.
_OPTIONS = Options(authenticated=True)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns root_rank's object on every rank; the other ranks' obj is ignored.

    The object is pickled by cloudpickle. Only ranks that have the job's secret can send it, and nobody on the way can
    change it (PACELINE_INTEGRITY does not matter).

    Raises ValueError for a wrong root or a process set that is not registered, HorovodInternalError if ranks name
    different roots, one does not come in time or is lost, and what pickling raises.
    """
    is_root = engine.rank() == root_rank
    payload = cloudpickle.dumps(obj) if is_root else b""
    length = _sent(len(payload).to_bytes(8, "little"), 8, root_rank, name and f"{name}.sz", process_set)
    payload = _sent(payload, _rounded(int.from_bytes(length, "little")), root_rank, name and f"{name}.t", process_set)
    return obj if is_root else cloudpickle.loads(payload)  # which ends where the pickle does


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns the list of all ranks' objects, in rank order. They are pickled by cloudpickle.

    An elastic job's list has none of a lost rank.

    Raises ValueError for a process set that is not registered, HorovodInternalError if a rank does not come in time or
    is lost, and what pickling raises.
    """
    payload = cloudpickle.dumps(obj)
    memory = ctypes.create_string_buffer(payload, len(payload))
    op = operation(
        abi.ALLGATHER,
        abi.UINT8,
        (len(payload),),
        ctypes.addressof(memory),
        0,
        name=name,
        process_set=process_set_number(process_set),
        options=_OPTIONS,
    )

    def finish(handles: Any, payload: Any = memory) -> list[bytes]:  # keeps the payload until the end
        gathered, rows, _ = engine.result(handles[0])
        view, parts, at = memoryview(gathered).cast("B"), [], 0
        for count in rows:
            parts.append(bytes(view[at : at + count]))
            at += count
        return parts

    parts = synchronize(start([op], finish, at_once=True))
    return [cloudpickle.loads(part) for part in parts if part]  # a lost rank has no rows


def newest(process_set: ProcessSet, name: str) -> int:
    """The rank of a set whose parameters are declared: the last that joined before, or the lowest.

    After a join, and in an elastic job, it is one of those that ask: others may have joined again already, or are lost.

    name: the same on all that ask together. Raises HorovodInternalError if one does not come in time.
    """
    last = engine.last_joined
    if last is None and not engine.setting("elastic"):
        return min(process_set.ranks or [0])
    # Above 0, which ranks give that have joined. Where servers were lost ranks may take several for the last.
    rank, size = engine.rank(), engine.size()
    found = greatest(size + 1 + rank if rank == last else size - rank, f"paceline.newest.{name}", process_set)
    return found - size - 1 if found > size else size - found


def greatest(number: int, name: str, process_set: ProcessSet = global_process_set) -> int:
    """Returns the greatest of all ranks' numbers, of 64 bits, on every rank.

    It needs no rank of a given number: in an elastic job it ends well where ranks are lost. Raises
    HorovodInternalError if one does not come in time.
    """
    memory = ctypes.c_int64(number)
    address = ctypes.addressof(memory)
    op = operation(
        abi.ALLREDUCE,
        abi.INT64,
        (1,),
        address,
        address,
        reduce_op=Max,
        name=name,
        process_set=process_set_number(process_set),
        options=_OPTIONS,
    )
    return synchronize(start([op], lambda _: memory.value, at_once=True))


def _rounded(length: int) -> int:
    """Up by an eighth at most: each length that is sent is declared and stays so."""
    step = 1 << max(length.bit_length() - 4, 6)
    return -(-length // step) * step


def _sent(payload: bytes, length: int, root_rank: int, name: str | None, process_set: ProcessSet) -> bytes:
    """The root's bytes, in place of this rank's, which are as many."""
    memory = ctypes.create_string_buffer(payload, max(length, 1))
    address = ctypes.addressof(memory)
    op = operation(
        abi.BROADCAST,
        abi.UINT8,
        (length,),
        address,
        address,
        root=root_rank,
        name=name,
        process_set=process_set_number(process_set),
        options=_OPTIONS,
    )
    return synchronize(start([op], lambda _: memory.raw[:length], at_once=True))
