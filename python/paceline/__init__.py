"""Paceline: data-parallel training over ordinary Ethernet. Each framework has a module, such as paceline.torch."""

from __future__ import annotations

from paceline import compression as compression
from paceline.common.basics import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    supersteps,
    tally,
)
from paceline.common.checkpoint import compression_state, load_compression_state
from paceline.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from paceline.common.significance import Significance
from paceline.sync import (
    ASP,
    BSP,
    DSPS,
    PSSP,
    SSP,
    Adaptive,
    DropStragglers,
    DynamicPSSP,
    ElasticBSP,
    Expression,
    set_pull_condition,
    set_push_condition,
)

# fmt: off
__all__ = [
    "init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size",
    "start_timeline", "stop_timeline", "tally", "supersteps", "compression_state", "load_compression_state",
    "BSP", "ASP", "SSP", "DSPS", "PSSP", "DynamicPSSP", "DropStragglers", "Adaptive", "ElasticBSP", "Expression",
    "Significance", "set_pull_condition", "set_push_condition",
    "ProcessSet", "global_process_set", "add_process_set", "remove_process_set",
]
# fmt: on


def __getattr__(name: str) -> str:
    """`__version__`: the installed package's, or in a checkout the native library's."""
    if name != "__version__":
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import metadata

    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        from paceline.common.abi import library

        return library().pl_version().decode()
