"""What is asked of variables and optimizers of TensorFlow and of Keras."""

from __future__ import annotations

from typing import Any


def label_of(variable: Any) -> str:
    """What a variable is called on all ranks: as on the rank that has broadcast it, else as here.

    Keras 3 has a path, which is longer than the name.
    """
    if label := getattr(variable, "_paceline_label", None):
        return str(label)
    return str(getattr(variable, "path", None) or getattr(variable, "name", "variable")).partition(":")[0]


def call_it(variable: Any, label: str) -> None:
    """Has a variable be called as on the rank that has broadcast it."""
    if label != label_of(variable):
        try:
            variable._paceline_label, variable._paceline_numbers = label, {}
        except AttributeError:
            pass  # what takes no attributes has no gradients with names


def given_to(optimizer: Any, attribute: str) -> Any:
    """What DistributedOptimizer has given an optimizer, or the one within a LossScaleOptimizer. None for others."""
    own = getattr(optimizer, attribute, None)
    return own if own is not None else getattr(getattr(optimizer, "inner_optimizer", None), attribute, None)


def has_momentum(optimizer: Any) -> bool:
    """Whether an optimizer has momentum that is known: older ones have a tensor for it, and `_momentum` beside it."""
    known = (given_to(optimizer, name) for name in ("momentum", "_momentum"))
    return any(isinstance(momentum, (bool, int, float)) and momentum for momentum in known)
