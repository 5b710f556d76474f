"""paceline.tensorflow and paceline.keras on real ranks. Each rank runs pytest on the checks of tensorflow_ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HANG_S, clean_environment, reserved_port

pytest.importorskip("tensorflow", reason="TensorFlow is not installed here: make test-tensorflow")

TESTS = Path(__file__).parents[1]
CHECKS = sorted((TESTS / "frameworks" / "tensorflow_ranks").glob("check_*.py"))


def paceline_run(*argv, ranks=2, **env):
    """The output of `paceline run -np RANKS ARGV...`, which succeeds."""
    with reserved_port() as port:
        done = subprocess.run(
            ["paceline", "run", "-np", str(ranks), *map(str, argv)],
            env=clean_environment()
            | {"PACELINE_PORT": str(port), "TF_CPP_MIN_LOG_LEVEL": "2", "PACELINE_START_TIMEOUT": "180"}
            | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            | env,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("file", CHECKS, ids=[c.stem for c in CHECKS])
def test_every_rank_passes(file, tmp_path):
    paceline_run(sys.executable, TESTS / "ranks" / "run.py", tmp_path, "-x", "-q", "-p", "no:cacheprovider", file)


def test_kernels_that_wait_do_not_block_each_other(tmp_path):
    """As with a TensorFlow whose asynchronous kernels are missing or unknown."""
    file = TESTS / "frameworks" / "tensorflow_ranks" / "check_collectives.py"
    argv = [TESTS / "ranks" / "run.py", tmp_path, "-x", "-q", "-p", "no:cacheprovider", file]
    paceline_run(sys.executable, *argv, PACELINE_TENSORFLOW_SYNC="1")


@pytest.mark.parametrize("example", ["tensorflow_digits.py", "keras_digits.py"])
def test_example_learns_and_ranks_hold_the_same_parameters(example):
    said = paceline_run(sys.executable, TESTS.parents[1] / "examples" / example, "--epochs", "6")
    accuracy = float(re.search(r"test accuracy: ([\d.]+)%", said)[1])
    assert accuracy > 90 and "identical" in said and "DIFFERENT" not in said, said


def test_scripts_for_horovod_run_unedited():
    code = """
import horovod.tensorflow, horovod.keras, horovod.tensorflow.keras, horovod.tensorflow.mpi_ops
from horovod.keras import callbacks
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
import paceline.tensorflow
assert horovod.tensorflow is paceline.tensorflow
horovod.tensorflow.init()
assert horovod.tensorflow.size() == 2 and float(horovod.keras.allreduce(horovod.keras.rank() * 2.0)) == 1.0
for part in ("horovod.tensorflow.elastic", "horovod.keras.elastic"):
    try:
        __import__(part)
    except ImportError as e:
        assert "checkpoints" in str(e), e
    else:
        raise SystemExit(part)
"""
    paceline_run("--horovod", sys.executable, "-c", code)


def test_every_name_of_horovod_is_there():
    import paceline.keras
    import paceline.tensorflow

    # fmt: off
    core = [
        "init", "shutdown", "is_initialized", "start_timeline", "stop_timeline", "size", "local_size", "cross_size",
        "rank", "local_rank", "cross_rank", "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled",
        "gloo_built", "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built", "ProcessSet",
        "global_process_set", "add_process_set", "remove_process_set", "Compression", "Average", "Sum", "Adasum",
    ]
    tensorflow = [
        "Min", "Max", "Product", "allreduce", "grouped_allreduce", "allgather", "grouped_allgather",
        "broadcast", "broadcast_", "alltoall", "reducescatter", "grouped_reducescatter", "join", "broadcast_variables",
        "broadcast_global_variables", "broadcast_object", "broadcast_object_fn", "allgather_object",
        "BroadcastGlobalVariablesHook", "DistributedOptimizer", "DistributedGradientTape",
        "PartialDistributedGradientTape", "SyncBatchNormalization", "LocalGradientAggregationHelper",
        "is_homogeneous", "rank_op", "local_rank_op", "size_op", "local_size_op", "process_set_included_op",
        "check_num_rank_power_of_2", "gpu_available",
    ]
    keras = [
        "DistributedOptimizer", "PartialDistributedOptimizer", "allreduce", "allgather", "broadcast", "reducescatter",
        "broadcast_global_variables", "load_model", "callbacks",
    ]
    callbacks = [
        "BroadcastGlobalVariablesCallback", "MetricAverageCallback", "LearningRateScheduleCallback",
        "LearningRateWarmupCallback", "BestModelCheckpoint",
    ]
    # fmt: on
    assert [n for n in core + tensorflow if not hasattr(paceline.tensorflow, n)] == []
    assert [n for n in core + keras if not hasattr(paceline.keras, n)] == []
    assert [n for n in callbacks if not hasattr(paceline.keras.callbacks, n)] == []
