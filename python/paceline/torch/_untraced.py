"""Keeps torch.compile out of what PyTorch calls of ours: it would compile the frames that its C++ code enters."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

Class = TypeVar("Class", bound=type)


def untraced(cls: Class) -> Class:
    """Has the methods of a class, and what they call, run as they are, without an import of torch.compile's modules.

    This is what torch.compiler.disable does, which imports them. Before PyTorch 2.7 they are compiled.
    """
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == __name__.partition(".")[0]:
            for method in vars(base).values():
                if isinstance(method, FunctionType):
                    _leave(method)
    return cls


def _leave(method: FunctionType) -> None:
    method._torchdynamo_disable = True  # type: ignore[attr-defined]  # where compiled code calls it itself
    frames: Any = getattr(torch._C._dynamo, "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(method.__code__, frames._FrameExecStrategy(skip, skip))
