"""Codecs that the engine applies: see paceline.common.compression."""

from __future__ import annotations

from paceline.common.compression import *
