"""The parts of Horovod that Paceline lacks, and what to use instead."""

from __future__ import annotations

import sys
from typing import Any

_ELASTIC = "start a script that uses hvd.elastic by `paceline run --min-np`"
_CLUSTER = "start workers with `paceline run`, torchrun, mpirun or srun, or a function on this host with horovod.run"

_RUN = "horovod.run is a function, as of Horovod 0.19: import horovod, or from horovod.runner import run"

_INSTEAD = {
    "run": _RUN,
    "torch.mpi_lib": "its functions are in horovod.torch.mpi_ops",
    "torch.mpi_lib_v2": "its functions are in horovod.torch.mpi_ops",
    "runner.elastic": _ELASTIC,
    "runner.run_commandline": "its command is `paceline run`; from Python, run that by subprocess",
    "common.basics.HorovodBasics": "its methods are functions of horovod.torch, horovod.tensorflow and the others",
    "common.elastic.notification_manager": "a process hears of changed hosts by itself, as soon as it has called init",
    "tensorflow.data": "tf.data loads in the background with Dataset.prefetch",
    "spark": _CLUSTER,
    "ray": _CLUSTER,
    "runner": _CLUSTER,
}

_PRESENT = ("run", "runner")  # of which only parts are absent


def instead(part: str) -> str:
    """What to use instead of a part of Horovod, such as "torch.elastic.state"; "" where nothing is known."""
    while part:
        if part in _INSTEAD:
            return _INSTEAD[part]
        part = part.rpartition(".")[0]
    return ""


def absence(part: str) -> str:
    """The message for a part of Horovod that Paceline lacks."""
    hint = instead(part)
    return (
        f"this is Paceline, which stands in for Horovod and does not have this part of it{': ' if hint else ''}{hint}"
    )


def explain_absent_names(module: str) -> None:
    """Has `from MODULE import NAME` say what to use instead. module: one that Horovod has too, or "horovod".

    Python would replace an AttributeError's message by its own; an ImportError reaches the script. Type checkers, which
    take any name of a module that defines __getattr__, do not see this one.
    """
    within = module.partition(".")[2]

    def __getattr__(name: str) -> Any:
        part = f"{within}.{name}".lstrip(".")
        if part in _INSTEAD and part not in _PRESENT:
            raise ImportError(f"cannot import name {name!r} from 'horovod{within and '.'}{within}': {absence(part)}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    vars(sys.modules[module])["__getattr__"] = __getattr__
