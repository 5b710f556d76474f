"""The frameworks' native glue: one library for each, built from bindings/."""

from __future__ import annotations

import ctypes
import pathlib

from paceline.common import abi


def path(framework: str) -> pathlib.Path:
    """The path of the framework's glue, in this package."""
    return pathlib.Path(__file__).parents[1] / "_native" / f"libpaceline_{framework}.so"


def bind(framework: str) -> ctypes.CDLL:
    """The framework's glue, which calls the engine that this process has loaded.

    Raises ImportError if it is missing, or not of the engine's release.
    """
    file = path(framework)
    try:
        glue = ctypes.CDLL(str(file))
    except OSError as e:
        raise ImportError(f"Paceline's glue for {framework} cannot be loaded from {file}: {e}") from e
    function = getattr(glue, f"pl_{framework}_bind", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p]
    if function is None or function(abi.library()._handle) != 0:
        raise ImportError(f"{file} and {abi.library_path()} are not of the same release of Paceline")
    return glue
