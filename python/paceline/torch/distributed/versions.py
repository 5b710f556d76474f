"""Which PyTorch the backend works with. It needs more of PyTorch than others may: what that keeps to itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_OTHERS = "use Horovod's API (import paceline.torch as hvd), which works with PyTorch 2.1 and newer"


def check() -> None:
    """Raises ImportError for a PyTorch that is too old.

    Before 2.7 PyTorch's callers in C++ keep the part of a work that is in C++ alone.
    """
    if torch.__version__ < "2.7":
        raise ImportError(
            f"the torch.distributed backend of Paceline needs PyTorch 2.7 or newer, and this is {torch.__version__}: "
            + _OTHERS
        )


@contextlib.contextmanager
def known() -> Iterator[None]:
    """Raises ImportError where PyTorch lacks a name that is used within."""
    try:
        yield
    except (ImportError, AttributeError) as e:
        raise ImportError(
            f"the torch.distributed backend of Paceline does not know PyTorch {torch.__version__} ({e}): it is tested "
            f"with 2.7 to 2.15; install one of these, or a newer Paceline, or {_OTHERS}"
        ) from e
