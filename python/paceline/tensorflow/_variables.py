"""What is asked of variables of TensorFlow and of Keras."""

from __future__ import annotations

from typing import Any


def label_of(variable: Any) -> str:
    """What a variable is called: Keras 3 has a path, which is longer than the name."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", "variable")).partition(":")[0]
