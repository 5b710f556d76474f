"""The native glue between XLA and the engine, and whether this JAX can use it."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import re
from typing import Any

import jax
import jaxlib

from paceline.common import glue

TARGET = "paceline_collective"
_MINIMUM = (0, 4, 18)
_TESTED = "0.4.18 to 0.10.2"
_FUTURES = 1  # the minor version of XLA's FFI that has them first


def check_version() -> None:
    """Raises ImportError for a JAX that is too old."""
    if jax.__version_info__ < _MINIMUM:
        raise ImportError(
            f"JAX {jax.__version__} is too old for paceline.jax, which is tested with {_TESTED}: "
            "pip install --upgrade 'paceline[jax]'"
        )


def unknown_version(e: Exception) -> ImportError:
    """The error for a JAX that lacks a name which this package uses."""
    return ImportError(
        f"paceline.jax does not know JAX {jax.__version__} ({e}): it is tested with {_TESTED}; install one of these, "
        "or a newer Paceline"
    )


try:
    from jax.ffi import register_ffi_target
except ModuleNotFoundError:  # JAX before 0.5: those whose XLA has futures know no tokens among results
    register_ffi_target = None
except ImportError as e:
    raise unknown_version(e) from e

_loaded: list[ctypes.CDLL] = []


def set_job(number: int) -> None:
    """Has the handler refuse programs that were compiled for another job."""
    for library in _loaded:
        library.pl_jax_set_job(number)


@functools.cache
def has_handler() -> bool:
    """Registers the handler with XLA, once. Whether it can be used: handlers return futures since jaxlib 0.5.

    Otherwise collectives in programs are Python callbacks, and on devices other than CPUs always.
    """
    minor = _minor_version()
    if minor < _FUTURES or register_ffi_target is None:
        return False
    library = glue.bind("jax")
    library.pl_jax_set_minor(minor)
    library.pl_jax_set_job.argtypes = [ctypes.c_int64]
    _loaded.append(library)
    register_ffi_target(TARGET, _capsule(library.pl_jax_collective), platform="cpu")
    return True


def _minor_version() -> int:
    """The minor version of XLA's FFI, by the header that jaxlib ships; -1 if it is unknown or the major one is new."""
    header = pathlib.Path(jaxlib.__path__[0]) / "include" / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError:
        return -1
    found = {k: int(n) for k, n in re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text)}
    return found.get("MINOR", -1) if found.get("MAJOR") == 0 else -1


def _capsule(function: Any) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.cast(function, ctypes.c_void_p), b"xla._CUSTOM_CALL_TARGET", None)
