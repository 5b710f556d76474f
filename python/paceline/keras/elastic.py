"""Elastic training: see paceline.tensorflow.keras.elastic."""

from __future__ import annotations

from paceline.tensorflow.keras.elastic import *
