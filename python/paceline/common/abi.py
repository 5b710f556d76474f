"""The C ABI of cgo/paceline.h as ctypes: structures, numbers and the loaded library."""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import pathlib
from typing import Any

VERSION = 2  # PL_ABI_VERSION of the header this module was written for

OK, PENDING = 0, 1
ERR_INVALID, ERR_NOT_INITIALIZED, ERR_DUPLICATE, ERR_TIMEOUT, ERR_INTERRUPTED = -1, -2, -3, -9, -13

ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, BARRIER, ACCUMULATE, SEND, RECEIVE = range(9)
ANY_RANK = -1  # the root of a receive that takes a message of any rank
DECLARE, ADD, READ, READ_NOW, WITHIN, EXACT = 1, 2, 4, 8, 16, 32  # uses of a held value
UINT8, INT8, INT16, INT32, INT64, FLOAT16, BFLOAT16, FLOAT32, FLOAT64, BOOL = range(10)


class Sync(ctypes.Structure):
    """pl_sync: the synchronisation model of a tensor."""

    _fields_ = [("size", ctypes.c_uint32), ("soft_park", ctypes.c_uint32), ("model", ctypes.c_char_p)]


class Codec(ctypes.Structure):
    """pl_codec: how a tensor is coded."""

    _fields_ = [("size", ctypes.c_uint32), ("reserved", ctypes.c_uint32), ("codec", ctypes.c_char_p)]


class Gate(ctypes.Structure):
    """pl_gate: which changes are too small to send."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("threshold", ctypes.c_double),
        ("decay", ctypes.c_double),
    ]


class Held(ctypes.Structure):
    """pl_held: an operation on a value that the servers hold."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("use", ctypes.c_uint32),
        ("significance", ctypes.c_float),
        ("reserved", ctypes.c_uint32),
        ("group", ctypes.c_char_p),
    ]


def int32(value: int, what: str) -> int:
    """The value, which ctypes would cut. Raises ValueError where it is no integer or has more than 32 bits."""
    try:
        value = operator.index(value)
    except TypeError:
        raise ValueError(f"{what} {value!r}: give an int, not {type(value).__name__}") from None
    if -(1 << 31) <= value < 1 << 31:
        return value
    raise ValueError(f"{what} {value}: it has more than 32 bits")


class Op(ctypes.Structure):
    """pl_op: one operation."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("reduce_op", ctypes.c_uint32),
        ("process_set", ctypes.c_uint32),
        ("root", ctypes.c_int32),
        ("priority", ctypes.c_int32),
        ("ndim", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("splits", ctypes.POINTER(ctypes.c_int64)),
        ("nsplits", ctypes.c_uint32),
        ("prescale", ctypes.c_double),
        ("postscale", ctypes.c_double),
        ("name", ctypes.c_char_p),
        ("sync", ctypes.POINTER(Sync)),
        ("codec", ctypes.POINTER(Codec)),
        ("pull_gate", ctypes.POINTER(Gate)),
        ("held", ctypes.POINTER(Held)),
        ("empty", ctypes.c_uint32),
        ("sequence", ctypes.c_uint32),
        ("done", ctypes.c_void_p),  # a pl_done_fn
        ("done_arg", ctypes.c_void_p),
        ("authenticated", ctypes.c_uint32),
        ("at_once", ctypes.c_uint32),
        ("tag", ctypes.c_uint64),
        ("timeout_ms", ctypes.c_int64),
        ("later", ctypes.c_uint32),
        ("unnamed", ctypes.c_uint32),
    ]

    origin: Op | None = None  # what it is a copy of
    again: tuple[Any, Any] | None = None  # what it is known by, and what it is, where it may come again (operation.py)


class Output(ctypes.Structure):
    """pl_output: the results of a finished operation beyond its output memory."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("nrows", ctypes.c_uint32),
        ("rows", ctypes.POINTER(ctypes.c_int64)),
        ("value", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
    ]


_PROTOTYPES = {
    "pl_abi_version": (ctypes.c_uint32, []),
    "pl_version": (ctypes.c_char_p, []),
    "pl_last_error": (ctypes.c_char_p, []),
    "pl_init": (ctypes.c_int, [ctypes.c_char_p]),
    "pl_shutdown": (ctypes.c_int, []),
    "pl_seat": (ctypes.c_int64, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64]),
    "pl_info": (ctypes.c_int64, [ctypes.c_char_p, ctypes.c_uint64]),
    "pl_submit": (ctypes.c_int, [ctypes.POINTER(Op), ctypes.c_uint32, ctypes.POINTER(ctypes.c_int32)]),
    "pl_gathers": (ctypes.POINTER(ctypes.c_int64), []),
    "pl_arena_alloc": (ctypes.c_void_p, [ctypes.c_uint64]),
    "pl_arena_free": (ctypes.c_int, [ctypes.c_void_p]),
    "pl_check_sync": (ctypes.c_int, [ctypes.POINTER(Sync), ctypes.c_uint32, ctypes.c_uint32]),
    "pl_sync_info": (ctypes.c_int64, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64]),
    "pl_check_codec": (ctypes.c_int, [ctypes.c_char_p]),
    "pl_codec_info": (ctypes.c_int64, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64]),
    "pl_set_condition": (ctypes.c_int, [ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64)]),
    "pl_end_iteration": (ctypes.c_int, [ctypes.c_uint32, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int32)]),
    "pl_begin_iteration": (ctypes.c_int, [ctypes.c_uint32, ctypes.c_char_p]),
    "pl_join": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)]),
    "pl_poll": (ctypes.c_int, [ctypes.c_int32]),
    "pl_wait": (ctypes.c_int, [ctypes.c_int32, ctypes.c_int64]),
    "pl_wait_all": (ctypes.c_int, [ctypes.POINTER(ctypes.c_int32), ctypes.c_uint32, ctypes.c_int64]),
    "pl_error": (ctypes.c_int64, [ctypes.c_int32, ctypes.c_char_p, ctypes.c_uint64]),
    "pl_result": (ctypes.c_int, [ctypes.c_int32, ctypes.POINTER(Output)]),
    "pl_release": (ctypes.c_int, [ctypes.c_int32]),
    "pl_release_all": (ctypes.c_int, [ctypes.POINTER(ctypes.c_int32), ctypes.c_uint32]),
    "pl_free": (None, [ctypes.c_void_p]),
    "pl_state": (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_uint64]),
    "pl_set_state": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_uint64]),
    "pl_process_set_add": (
        ctypes.c_int,
        [ctypes.POINTER(ctypes.c_int32), ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32)],
    ),
    "pl_process_set_find": (
        ctypes.c_int,
        [ctypes.POINTER(ctypes.c_int32), ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32)],
    ),
    "pl_process_set_remove": (ctypes.c_int, [ctypes.c_uint32]),
    "pl_timeline_start": (ctypes.c_int, [ctypes.c_char_p]),
    "pl_timeline_stop": (ctypes.c_int, []),
}

# These are also attributes of the library without their prefix, and without argument types, whose checks take longer
# than some of the calls. Their arguments are byref(...) for pointers, c_int64(...) for 64 bits, and numbers.
_FREQUENT = ("pl_submit", "pl_poll", "pl_wait_all", "pl_release_all")


NO_HANDLE = -1  # where the library has not written one


def no_handles(count: int) -> Any:
    """An array for the handles of so many operations."""
    return _One(NO_HANDLE) if count == 1 else (ctypes.c_int32 * count)(*[NO_HANDLE] * count)


_One = ctypes.c_int32 * 1


def library_path() -> pathlib.Path:
    """The path of libpaceline.so: PACELINE_LIBRARY, or in the package."""
    override = os.environ.get("PACELINE_LIBRARY")
    return pathlib.Path(override) if override else pathlib.Path(__file__).parents[1] / "_native" / "libpaceline.so"


@functools.cache
def library() -> ctypes.CDLL:
    """The native library, loaded at its first use. Raises ImportError if it is missing or has another version."""
    path = library_path()
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as e:
        raise ImportError(
            f"Paceline's native library cannot be loaded from {path}: {e}. Install the wheel, or build "
            "it in a checkout with `make setup`, or point PACELINE_LIBRARY at it."
        ) from e
    speaks = lib.pl_abi_version() if hasattr(lib, "pl_abi_version") else "none"
    if speaks != VERSION:
        raise ImportError(
            f"{path} speaks version {speaks} of Paceline's C interface and this package version {VERSION}: install "
            "both from the same release"
        )
    for name, (restype, argtypes) in _PROTOTYPES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = restype, argtypes
    for name in _FREQUENT:
        setattr(lib, name.removeprefix("pl_"), lib[name])
    return lib


def gathers() -> ctypes.c_int64:
    """The number to which pl_gathers points, which changes."""
    return library().pl_gathers().contents
