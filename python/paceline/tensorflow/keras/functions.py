"""Operations on values, and loading of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from paceline.common.operators import Average
from paceline.tensorflow import functions, mpi_ops
from paceline.tensorflow.compression import Compression
from paceline.tensorflow.keras._version import KERAS_3, evaluated, keras
from paceline.tensorflow.keras.optimizer import DistributedOptimizer


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduces a value over all ranks. Returns a number, or a NumPy array of the value's shape.

    value: a number, an array or a tensor, of the same shape and type on all ranks. The other arguments are those of
        `paceline.tensorflow.allreduce`.

    Raises as paceline.tensorflow.allreduce does: HorovodInternalError, on every rank, if ranks gave different shapes or
    types, one gave nothing in time or a peer is lost.
    """
    return _plain(
        mpi_ops.allreduce(
            mpi_ops.dense_tensor(value),
            average,
            compression=compression,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            name=name,
        )
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenates all ranks' arrays along the first dimension, in rank order. Returns a NumPy array.

    value: of shape [rows, ...], in which rows may differ between ranks. name: as of `allreduce`.

    Raises as paceline.tensorflow.allgather does: HorovodInternalError, on every rank, if ranks gave different shapes or
    types, one gave nothing in time or a peer is lost.
    """
    return _plain(mpi_ops.allgather(value, name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns root_rank's value: a number, or a NumPy array of its shape, which the other ranks' values have too.

    value: a number, an array or a tensor. root_rank: a global rank. name: as of `allreduce`.

    Raises as paceline.tensorflow.broadcast does: HorovodInternalError, on every rank, if ranks gave different shapes or
    types, one gave nothing in time or a peer is lost.
    """
    return _plain(mpi_ops.broadcast(value, root_rank, name))


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduces an array over all ranks and returns this rank's part of its rows, a NumPy array.

    value: of shape [rows, ...], the same on all ranks. If the number of rows is no multiple of the ranks', the lower
        ranks get one more. name, op: as of `allreduce`.

    Raises as paceline.tensorflow.reducescatter does: HorovodInternalError, on every rank, if ranks gave different
    shapes or types, one gave nothing in time or a peer is lost.
    """
    return _plain(mpi_ops.reducescatter(value, op=op, name=name))


def _plain(tensor: tf.Tensor) -> Any:
    array: np.ndarray[Any, Any] = np.asarray(evaluated(tensor))
    return array if array.ndim else array.item()


def broadcast_global_variables(root_rank: int) -> None:
    """Gives all global variables root_rank's values, in Keras's session. Raises RuntimeError with eager execution."""
    evaluated(functions.broadcast_global_variables(root_rank))


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """keras.models.load_model, with the model's optimizer as a DistributedOptimizer in the state that was saved.

    custom_optimizers, custom_objects: what the file names and Keras does not have. compression: as of
    `DistributedOptimizer`. legacy_opts: Horovod's, without effect.

    Raises what keras.models.load_model raises, and ValueError for a wrong compression.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
        if KERAS_3:
            model.jit_compile = False
    return model
