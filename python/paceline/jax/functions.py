"""Broadcasts of parameters, and objects."""

from __future__ import annotations

import io
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from paceline.common import abi
from paceline.common.engine import engine
from paceline.common.operation import Options
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.jax import _host
from paceline.jax._collective import settle
from paceline.jax._ops import broadcast, call_of

Tree = TypeVar("Tree")

# What is unpickled, and its length, is authenticated on every connection.
_OBJECT = Options(authenticated=True)


def broadcast_parameters(params: Tree, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Tree:
    """Returns root_rank's values of a pytree, such as a model's parameters or an optimizer's state.

    JAX's arrays do not change, so that the result takes the argument's place: `params = broadcast_parameters(params)`.
    Shapes and types are the same on all ranks. An empty tree is returned as it is.
    """
    import jax

    leaves = jax.tree_util.tree_leaves(params)
    return broadcast(params, root_rank, "broadcast", process_set) if leaves else params


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns root_rank's object on every rank; the other ranks' obj is ignored.

    The object is pickled by cloudpickle. Only ranks that have the job's secret can send it, and nobody on the way can
    change it (PACELINE_INTEGRITY does not matter).
    """
    settle()
    is_root = engine.rank() == root_rank
    payload = _pickled(obj) if is_root else np.empty(0, np.uint8)
    length = _sent(np.array([payload.size]), root_rank, name and f"{name}.sz", process_set)
    if not is_root:
        payload = np.empty(int(length[0]), np.uint8)
    payload = _sent(payload, root_rank, name and f"{name}.t", process_set)
    return obj if is_root else _unpickled(payload)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns the list of all ranks' objects, in rank order. They are pickled by cloudpickle."""
    settle()
    payload = _pickled(obj)
    lengths = _gathered(np.array([payload.size]), name and f"{name}.sz", process_set)
    payloads = _gathered(payload, name and f"{name}.t", process_set)
    return [_unpickled(part) for part in np.split(payloads, np.cumsum(lengths)[:-1])]


def _sent(array: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
    return _host.run(call_of(abi.BROADCAST, [name], process_set, root=root_rank, options=_OBJECT), [array])[0]


def _gathered(array: Any, name: str | None, process_set: ProcessSet) -> Any:
    return _host.run(call_of(abi.ALLGATHER, [name], process_set, options=_OBJECT), [array])[0]


def _pickled(obj: Any) -> Any:
    return np.frombuffer(cloudpickle.dumps(obj), dtype=np.uint8)


def _unpickled(payload: Any) -> Any:
    return cloudpickle.load(io.BytesIO(payload.tobytes()))
