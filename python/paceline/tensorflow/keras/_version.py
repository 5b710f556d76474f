"""Checks the installed Keras, at import."""

from __future__ import annotations

import keras

if int(keras.__version__.partition(".")[0]) < 3:
    raise ImportError(
        f"paceline.keras cannot use Keras {keras.__version__}: it needs Keras 3, "
        "which comes with TensorFlow 2.16 and newer"
    )
if keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"paceline.keras cannot use Keras's backend {keras.backend.backend()!r}: set KERAS_BACKEND=tensorflow"
    )
