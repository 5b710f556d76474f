"""Loads the glue between TensorFlow and the engine, and says why where it cannot.

TensorFlow opens the glue first, because it notices what is registered while it does; then Python gives it the engine.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

try:
    import tensorflow as tf
except ModuleNotFoundError as e:
    if e.name != "tensorflow":
        raise
    raise ModuleNotFoundError(
        "TensorFlow is not installed, which paceline.tensorflow and paceline.keras need; "
        "pip install 'paceline[tensorflow]'",
        name="tensorflow",
    ) from None

from paceline.common import glue
from paceline.common.engine import engine
from paceline.common.util import is_version_greater_equal_than

_MINIMUM = "2.12.0"
_TESTED = "2.12 to 2.21"


def unusable(why: object) -> ImportError:
    """The error for a TensorFlow that this package cannot work with."""
    return ImportError(
        f"paceline.tensorflow cannot use TensorFlow {tf.__version__}: {why}. It needs {_MINIMUM} or newer "
        f"and is tested with {_TESTED}"
    )


def _load() -> tuple[Any, Any, bool]:
    if not is_version_greater_equal_than(tf.__version__, _MINIMUM):
        raise unusable("it is too old")
    try:
        operations = tf.load_op_library(str(glue.path("tensorflow")))
    except (RuntimeError, tf.errors.OpError) as e:
        raise unusable(e) from None
    native = glue.bind("tensorflow")
    native.pl_tensorflow_load_error.restype = ctypes.c_char_p
    if why := native.pl_tensorflow_load_error():
        raise unusable(why.decode())
    native.pl_tensorflow_set_job.argtypes = [ctypes.c_int64, ctypes.c_int64]
    try:
        tf.keras.layers  # noqa: B018, which imports Keras
    except ImportError as e:
        if os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True"):  # what TensorFlow looks for
            raise unusable(f"{e} TF_USE_LEGACY_KERAS asks for another: pip install --no-deps tf_keras") from None
        backend = os.environ.get("KERAS_BACKEND", "tensorflow")
        raise unusable(f"{e} Keras's backend is {backend}: set KERAS_BACKEND=tensorflow") from None
    return operations, native, bool(native.pl_tensorflow_async())


# ops: the operations PacelineExchange, PacelineChange, PacelineGather and PacelineAlltoall. asynchronous: whether they
# leave TensorFlow's threads while they wait for other ranks.
ops, _native, asynchronous = _load()


def job() -> tuple[int, int]:
    """(round, generation) of this process's job, by which functions that were traced for another are refused."""
    _native.pl_tensorflow_set_job(engine.round, engine.generation)
    return engine.round, engine.generation


engine.at_shutdown(lambda: _native.pl_tensorflow_set_job(0, 0))


_OURS = ("PacelineExchange", "PacelineChange", "PacelineGather", "PacelineAlltoall")


def _let_run_in_any_order() -> None:
    """Takes the operations out of the order in which tf.function runs stateful operations; each runs nevertheless.

    Their names match them between ranks, so that each may start as soon as its input is ready. Where they wait in
    TensorFlow's threads, that order stays: two ranks that wait for different tensors would wait for ever.
    """
    from tensorflow.python.framework import auto_control_deps

    known = auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS
    if asynchronous:
        auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS = frozenset(known) | frozenset(_OURS)


def _keep_calls_in_order() -> None:
    """Has calls of functions that have such operations run in the program's order where they share a variable.

    Two calls of one function have the same names. TensorFlow orders calls that change a variable, and lets those run in
    any order that only read it: these could be summed with each other.
    """
    from tensorflow.python.framework import auto_control_deps

    tf.Graph._get_function  # noqa: B018, which _has_ours calls

    @auto_control_deps.register_acd_resource_resolver  # type: ignore[untyped-decorator]
    def as_if_changed(op: Any, reads: Any, writes: Any) -> bool:
        if op.type != "StatefulPartitionedCall" or not len(reads) or not _has_ours(op):
            return False
        writes.update(list(reads))
        reads.clear()
        return True


def _has_ours(call: Any) -> bool:
    """Whether a function that is called has operations of ours, or calls one that has."""
    function = call.graph._get_function(call.get_attr("f").name)
    graph = getattr(function, "graph", None)
    if graph is None:  # of a saved model
        return False
    known: bool | None = getattr(graph, "_paceline_has_ours", None)
    if known is None:
        known = any(
            op.type in _OURS or (op.type == "StatefulPartitionedCall" and _has_ours(op))
            for op in graph.get_operations()
        )
        graph._paceline_has_ours = known
    return known


def _keep_from_autograph() -> None:
    """Has tf.function call this package as it is: rewriting its code into graphs would only cost time."""
    from tensorflow.python.autograph.core import config

    config.CONVERSION_RULES = (config.DoNotConvert("paceline"), *config.CONVERSION_RULES)


try:  # what TensorFlow keeps to itself
    _let_run_in_any_order()
    _keep_calls_in_order()
    _keep_from_autograph()
except (ImportError, AttributeError) as e:
    raise unusable(e) from e
