"""Horovod's API for MXNet: `import paceline.mxnet as hvd`.

Names, arguments and results are those of horovod.mxnet. Operations run in MXNet's engine, behind what they depend on.
"""

from __future__ import annotations

from paceline.common import core as _core
from paceline.common.core import *
from paceline.common.util import split_list
from paceline.mxnet import _glue  # noqa: F401
from paceline.mxnet.compression import Compression
from paceline.mxnet.functions import allgather_object, broadcast_object
from paceline.mxnet.mpi_ops import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    reducescatter,
)
from paceline.mxnet.training import DistributedOptimizer, DistributedTrainer, broadcast_parameters

# fmt: off
__all__ = [
    "allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_", "allgather", "grouped_allgather", "broadcast",
    "broadcast_", "alltoall", "reducescatter", "grouped_reducescatter", "allgather_object", "broadcast_object",
    "broadcast_parameters", "DistributedOptimizer", "DistributedTrainer", "Compression", "split_list",
]
# fmt: on
__all__ += _core.__all__
