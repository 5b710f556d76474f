"""The parts of Horovod that Paceline lacks, and what to use instead."""

from __future__ import annotations

_ELASTIC = "start a script that uses hvd.elastic by `paceline run --min-np`"
_FRAMEWORK = "the APIs are those for PyTorch, TensorFlow and Keras, such as import horovod.torch, or paceline.torch"
_CLUSTER = "start workers with `paceline run`, torchrun, mpirun or srun, or a function on this host with horovod.run"

_INSTEAD = {
    "runner.elastic": _ELASTIC,
    "tensorflow.data": "tf.data loads in the background with Dataset.prefetch",
    "mxnet": _FRAMEWORK,
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
