"""Callbacks of Keras's training: see paceline.tensorflow.keras.callbacks."""

from __future__ import annotations

from paceline.tensorflow.keras.callbacks import *
