"""Horovod's API for PyTorch: `import paceline.torch as hvd`.

Names, arguments, defaults and results are those of horovod.torch 0.28.1. In addition there are
`DistributedOptimizer(sync=...)` and `declare`, for synchronisation models that let ranks run ahead.
"""

from __future__ import annotations

try:
    import torch as _torch
except ModuleNotFoundError as e:
    if e.name != "torch":
        raise
    raise ModuleNotFoundError("PyTorch is not installed; pip install 'paceline[torch]'", name="torch") from None

if not hasattr(_torch.Tensor, "register_post_accumulate_grad_hook"):
    raise ImportError(
        f"PyTorch {_torch.__version__} is too old for paceline.torch, which needs 2.1 and is tested with 2.15: "
        "pip install --upgrade 'paceline[torch]'"
    )

from paceline._absent import explain_absent_names as _explain_absent_names
from paceline.common import core as _core
from paceline.common.core import *
from paceline.common.util import check_extension as check_extension
from paceline.torch import elastic
from paceline.torch import mpi_ops as _mpi_ops
from paceline.torch._arena import zeros_in_arena
from paceline.torch.functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from paceline.torch.mpi_ops import *
from paceline.torch.optimizer import DistributedOptimizer
from paceline.torch.sync_batch_norm import SyncBatchNorm
from paceline.torch.values import Value, declare

__all__ = [
    "DistributedOptimizer",
    "SyncBatchNorm",
    "Value",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "declare",
    "elastic",
    "zeros_in_arena",
]
__all__ += _core.__all__ + _mpi_ops.__all__
_explain_absent_names(__name__)
