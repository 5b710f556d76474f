"""Horovod's API for TensorFlow: `import paceline.tensorflow as hvd`.

Names, arguments, defaults and results are those of horovod.tensorflow 0.28.1, eagerly and in tf.function. Keras has
`paceline.tensorflow.keras`, also named `paceline.keras`.
"""

from __future__ import annotations

from paceline.tensorflow import _glue as _glue  # checks TensorFlow before anything else uses it

# isort: split
from paceline._absent import explain_absent_names as _explain_absent_names
from paceline.common.util import check_extension as check_extension
from paceline.tensorflow import elastic as elastic
from paceline.tensorflow import mpi_ops as _mpi_ops
from paceline.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from paceline.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from paceline.tensorflow.gradients import DistributedGradientTape, PartialDistributedGradientTape
from paceline.tensorflow.mpi_ops import *
from paceline.tensorflow.optimizer import DistributedOptimizer
from paceline.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "BroadcastGlobalVariablesHook",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LocalGradientAggregationHelper",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
]
__all__ += _mpi_ops.__all__
_explain_absent_names(__name__)
