"""Loads the glue between MXNet and the engine, and says why where it cannot."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_TESTED = "1.9.1"
_NEEDS = f"paceline.mxnet is tested with MXNet {_TESTED}, which needs numpy below 1.24"

try:
    import mxnet
except ModuleNotFoundError as e:
    if e.name != "mxnet":
        raise
    raise ModuleNotFoundError("MXNet is not installed; pip install 'paceline[mxnet]'", name="mxnet") from None
except AttributeError as e:  # a name that NumPy no longer has
    raise ImportError(f"MXNet cannot be imported: {e}. {_NEEDS}; pip install 'paceline[mxnet]'") from e

from mxnet.base import _LIB  # noqa: E402

from paceline.common import abi, glue  # noqa: E402


def _load() -> Any:
    if not mxnet.__version__.startswith("1.9."):
        raise ImportError(f"paceline.mxnet does not know MXNet {mxnet.__version__}. {_NEEDS}")
    native = glue.bind("mxnet")
    native.pl_mxnet_use.argtypes, native.pl_mxnet_use.restype = [ctypes.c_void_p], ctypes.c_char_p
    native.pl_mxnet_push.argtypes = [ctypes.POINTER(abi.Op), ctypes.c_void_p, ctypes.c_void_p]
    if missing := native.pl_mxnet_use(_LIB._handle):
        raise ImportError(f"MXNet {mxnet.__version__} has no {missing.decode()}. {_NEEDS}")
    return native


_native = _load()
push, idle, end_job = _native.pl_mxnet_push, _native.pl_mxnet_idle, _native.pl_mxnet_end_job

# MXNet's engine for debugging runs each operation when it is pushed, and none that ends later.
naive = os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"
