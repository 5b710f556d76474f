"""Horovod's API for PyTorch: `import paceline.torch as hvd`.

Names, arguments, defaults and results are those of horovod.torch 0.28.1, without its elastic part. In addition there
are `DistributedOptimizer(sync=...)` and `declare`, for synchronisation models that let ranks run ahead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as e:
    if e.name != "torch":
        raise
    raise ModuleNotFoundError("PyTorch is not installed; pip install 'paceline[torch]'", name="torch") from None

from paceline._absent import instead as _instead
from paceline.common.util import check_extension as check_extension
from paceline.torch.functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from paceline.torch.mpi_ops import *
from paceline.torch.optimizer import DistributedOptimizer
from paceline.torch.sync_batch_norm import SyncBatchNorm
from paceline.torch.values import Value, declare

# fmt: off
__all__ = [
    "init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size",
    "start_timeline", "stop_timeline",
    "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built", "ddl_built",
    "ccl_built", "cuda_built", "rocm_built", "paceline_built",
    "ProcessSet", "global_process_set", "add_process_set", "remove_process_set",
    "Average", "Sum", "Adasum", "Min", "Max", "Product",
    "Compression", "HorovodInternalError",
    "DistributedOptimizer", "SyncBatchNorm",
    "allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "sparse_allreduce_async", "allgather", "allgather_async",
    "grouped_allgather", "grouped_allgather_async", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "alltoall", "alltoall_async", "reducescatter", "reducescatter_async",
    "grouped_reducescatter", "grouped_reducescatter_async",
    "join", "barrier", "poll", "synchronize",
    "declare", "Value",
]

if not TYPE_CHECKING:  # a type checker shall find names that do not exist

    def __getattr__(name: str) -> Any:
        """Says what to use instead of Horovod's elastic module."""
        hint = _instead(f"torch.{name}")
        raise AttributeError(f"module 'paceline.torch' has no attribute {name!r}{hint and ': '}{hint}")
