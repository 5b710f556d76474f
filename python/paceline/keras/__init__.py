"""Horovod's API for Keras, `import paceline.keras as hvd`: see paceline.tensorflow.keras."""

from __future__ import annotations

from paceline.tensorflow import keras as _keras
from paceline.tensorflow.keras import *

__all__ = _keras.__all__
