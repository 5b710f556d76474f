"""Horovod's API for JAX: `import paceline.jax as hvd`.

Names, arguments and results are those of Horovod's other modules. Operations take pytrees, and work under jax.jit,
jax.grad and jax.vmap. `distributed_optimizer` wraps an optax optimizer.
"""

from __future__ import annotations

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as e:
    if e.name != "jax":
        raise
    raise ModuleNotFoundError("JAX is not installed; pip install 'paceline[jax]'", name="jax") from None

from paceline.jax import _glue

_glue.check_version()

from paceline.common import core as _core  # noqa: E402
from paceline.common.core import *  # noqa: E402

try:
    from paceline.jax import _collective as _collective  # has what JAX keeps to itself
except (ImportError, AttributeError) as e:
    raise _glue.unknown_version(e) from e

from paceline.jax import elastic  # noqa: E402
from paceline.jax._ops import (  # noqa: E402
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from paceline.jax.compression import Compression  # noqa: E402
from paceline.jax.functions import allgather_object, broadcast_object, broadcast_parameters  # noqa: E402
from paceline.jax.optimizer import DistributedState, distributed_optimizer  # noqa: E402

# fmt: off
__all__ = [
    "allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast", "alltoall", "reducescatter",
    "grouped_reducescatter", "barrier", "join", "allgather_object", "broadcast_object", "broadcast_parameters",
    "distributed_optimizer", "DistributedState", "Compression", "elastic",
]
# fmt: on
__all__ += _core.__all__
