"""Horovod's API for Keras: `import paceline.keras as hvd`, or paceline.tensorflow.keras.

Keras is TensorFlow's, `tf.keras`, of version 2 or 3. Names, arguments, defaults and results are those of
horovod.keras 0.28.1.
"""

from __future__ import annotations

from paceline.tensorflow import _glue as _glue  # checks TensorFlow before anything else uses it

# isort: split
from paceline.common import core as _core
from paceline.common.core import *
from paceline.tensorflow.keras import _version as _version  # checks Keras

# isort: split
from paceline.tensorflow.functions import broadcast_object as broadcast_object
from paceline.tensorflow.functions import broadcast_variables as broadcast_variables
from paceline.tensorflow.keras import callbacks as callbacks
from paceline.tensorflow.keras import elastic as elastic
from paceline.tensorflow.keras.functions import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    load_model,
    reducescatter,
)
from paceline.tensorflow.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from paceline.tensorflow.mpi_ops import Compression
from paceline.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += _core.__all__
