"""The parts of Horovod that Paceline lacks, and what to use instead."""

from __future__ import annotations

_ELASTIC = "start a script that uses hvd.elastic by `paceline run --min-np`"
_CLUSTER = "start workers with `paceline run`, torchrun, mpirun or srun, or a function on this host with horovod.run"

_RUN = "horovod.run is a function, as of Horovod 0.19: import horovod, or from horovod.runner import run"

_INSTEAD = {
    "run": _RUN,
    "torch.mpi_lib": "its functions are in horovod.torch.mpi_ops",
    "torch.mpi_lib_v2": "its functions are in horovod.torch.mpi_ops",
    "runner.elastic": _ELASTIC,
    "tensorflow.data": "tf.data loads in the background with Dataset.prefetch",
    "spark": _CLUSTER,
    "ray": _CLUSTER,
    "runner": _CLUSTER,
}


def instead(part: str) -> str:
    """What to use instead of a part of Horovod, such as "torch.elastic.state"; "" where nothing is known."""
    while part:
        if part in _INSTEAD:
            return _INSTEAD[part]
        part = part.rpartition(".")[0]
    return ""
