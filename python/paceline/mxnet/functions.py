"""Objects of Python from rank to rank, under the name of Horovod's module."""

from __future__ import annotations

from paceline.common.objects import allgather_object, broadcast_object

__all__ = ["allgather_object", "broadcast_object"]
