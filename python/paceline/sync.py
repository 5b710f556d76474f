"""Synchronisation models, such as `paceline.SSP(3)`: see paceline.common.sync."""

from __future__ import annotations

from paceline.common.sync import *
