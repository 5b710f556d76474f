"""The operations under the name of Horovod's module: scripts import from `horovod.torch.mpi_ops`."""

from __future__ import annotations

from paceline.common import core
from paceline.common.core import *
from paceline.common.handles import poll, synchronize
from paceline.common.operators import operator_of
from paceline.common.util import gpu_available, num_rank_is_power_2
from paceline.torch._ops import (
    HorovodAllgather,
    HorovodAllreduce,
    HorovodAlltoall,
    HorovodBroadcast,
    HorovodReducescatter,
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    join,
    reducescatter,
)
from paceline.torch._ops_async import (
    allgather_async,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    reducescatter_async,
    sparse_allreduce_async,
)
from paceline.torch.compression import Compression

handle_average_backwards_compatibility = operator_of
HorovodGroupedAllgather, HorovodGroupedAllreduce = HorovodAllgather, HorovodAllreduce
HorovodGroupedReducescatter = HorovodReducescatter

# fmt: off
__all__ = [
    "Compression",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "sparse_allreduce_async", "allgather", "allgather_async",
    "grouped_allgather", "grouped_allgather_async", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "alltoall", "alltoall_async", "reducescatter", "reducescatter_async",
    "grouped_reducescatter", "grouped_reducescatter_async",
    "join", "barrier", "poll", "synchronize",
    "HorovodAllreduce", "HorovodGroupedAllreduce", "HorovodAllgather", "HorovodGroupedAllgather",
    "HorovodBroadcast", "HorovodAlltoall", "HorovodReducescatter", "HorovodGroupedReducescatter",
    "gpu_available", "num_rank_is_power_2", "handle_average_backwards_compatibility",
]
# fmt: on
__all__ += core.__all__
