"""Keras as TensorFlow hands it on, of either generation: what the rest of the package need not tell apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

keras = tf.keras

VERSION = str(getattr(keras, "__version__", tf.__version__))
SUPPORTED = (
    "Keras 2.12 to 2.15 with TensorFlow of the same numbers, and Keras 3, or tf_keras, with TensorFlow 2.16 and newer"
)

# Keras 2 has optimizers of two kinds, and Keras 3 one.
KERAS_3 = int(VERSION.partition(".")[0]) >= 3


def unusable(why: object) -> ImportError:
    """The error for a Keras that this package cannot work with."""
    return ImportError(f"paceline.keras cannot use Keras {VERSION}: {why}. It is made for {SUPPORTED}")


def _optimizers() -> tuple[Any, ...]:
    known: list[Any] = [keras.optimizers.Optimizer]
    if not KERAS_3:
        known.append(keras.optimizers.legacy.Optimizer)
    for kind in known:
        if not hasattr(kind, "apply" if KERAS_3 else "apply_gradients"):
            raise AttributeError(f"{kind.__name__} applies its gradients in another way")
    return tuple(known)


try:
    OPTIMIZERS = _optimizers()
except AttributeError as e:
    raise unusable(e) from None
if KERAS_3 and keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"paceline.keras cannot use Keras's backend {keras.backend.backend()!r}: set KERAS_BACKEND=tensorflow"
    )


def evaluated(result: Any) -> Any:
    """The value of a tensor. Without eager execution, as Keras 2 allows, Keras's session runs it, or an operation."""
    if result is None:
        return None
    if tf.executing_eagerly():
        return result.numpy()
    return tf.compat.v1.keras.backend.get_session().run(result)


def variables_of(optimizer: Any) -> list[Any]:
    """The variables of an optimizer: its iterations, learning rate and slots, as far as they exist."""
    if optimizer is None:
        return []
    variables = optimizer.variables
    found = list(variables() if callable(variables) else variables)
    if not KERAS_3:  # which keeps options such as the learning rate beside them
        for o in optimizer, getattr(optimizer, "inner_optimizer", None):
            options = [getattr(o, "_learning_rate", None), *getattr(o, "_hyper", {}).values()]
            found += [option for option in options if isinstance(option, tf.Variable)]
    return list({id(v): v for v in found}.values())


def build(optimizer: Any, variables: Iterable[Any]) -> None:
    """Makes an optimizer's slots for the variables, unless it has them. Also within tf.function."""
    if KERAS_3:
        if not optimizer.built:
            optimizer.build(list(variables))
        return
    with tf.init_scope():
        if isinstance(optimizer, OPTIMIZERS[1]):
            optimizer._create_all_weights(list(variables))
        elif not getattr(optimizer, "_built", False):
            optimizer.build(list(variables))
