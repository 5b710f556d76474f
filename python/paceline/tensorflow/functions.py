"""Broadcasts of variables, and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from paceline.common import objects
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.tensorflow._variables import call_it, label_of
from paceline.tensorflow.mpi_ops import broadcast_


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Gives variables root_rank's values: `hvd.broadcast_variables(model.variables, root_rank=0)`.

    variables: of any shapes and types; every rank has the same ones, in the same order. The result groups the
    assignments where it runs in a graph. inplace: Horovod's, without effect.

    Eagerly, their gradients have the root's names from then on: a model that one rank has loaded from a file, or made
    after another one, may have names of its own.

    Raises what `broadcast` raises.
    """
    targets = list(variables)
    assigned = broadcast_(targets, root_rank, None, process_set)
    if not tf.executing_eagerly():
        return tf.group(*[a for a in assigned if tf.is_tensor(a)])
    labels = broadcast_object([label_of(v) for v in targets], root_rank, process_set=process_set)
    for variable, label in zip(targets, labels, strict=True):
        call_it(variable, label)
    return None


def broadcast_global_variables(root_rank: int) -> Any:
    """Gives all global variables of a graph of TensorFlow 1 root_rank's values. Raises RuntimeError eagerly."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """A hook of a session of TensorFlow 1 that gives all global variables root_rank's values before training."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the broadcast to the graph."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the broadcast."""
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns root_rank's object on every rank; the other ranks' obj is ignored. It is pickled by cloudpickle.

    name: identifies the operation on all ranks, which otherwise match in the order in which they run. process_set: the
    ranks that take part, the root too. session: Horovod's, without effect.

    Raises ValueError for a wrong root or a process set that is not registered, HorovodInternalError if ranks name
    different roots, one does not come in time or is lost, and what pickling raises.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the list of all ranks' objects, in rank order. They are pickled by cloudpickle.

    name, process_set: as of `broadcast_object`. session: Horovod's, without effect. An elastic job's list has none of a
    lost rank.

    Raises ValueError for a process set that is not registered, HorovodInternalError if a rank does not come in time or
    is lost, and what pickling raises.
    """
    return objects.allgather_object(obj, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function of an object that returns root_rank's. session: Horovod's, without effect.

    Raises what `broadcast_object` raises, when the function is called.
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)
