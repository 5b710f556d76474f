"""paceline.tensorflow and paceline.keras on real ranks, which run the checks of tensorflow_ranks, and bad input."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
from docstrings import check_docstrings
from elastic_runs import Elastic, end_alike, replace
from jobs import HANG_S, Job, clean_environment, example, goes_on, reserved_port, wait_until_printed

pytest.importorskip("tensorflow", reason="TensorFlow is not installed here: make test-tensorflow")

TESTS = Path(__file__).parents[1]
CHECKS = sorted((TESTS / "frameworks" / "tensorflow_ranks").glob("check_*.py"))


SETTINGS = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "PACELINE_START_TIMEOUT": "180",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def run(*argv, **env):
    """(exit status, output) of a command."""
    with reserved_port() as port:
        done = subprocess.run(
            [*map(str, argv)],
            env=clean_environment() | SETTINGS | {"PACELINE_PORT": str(port)} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG_S,
            check=False,
        )
    return done.returncode, done.stdout


def paceline_run(*argv, ranks=2, **env):
    """The output of `paceline run -np RANKS ARGV...`, which succeeds."""
    code, said = run("paceline", "run", "-np", ranks, *argv, **env)
    assert code == 0, said[-12000:]
    return said


def python(code, **env):
    return run(sys.executable, "-c", textwrap.dedent(code), **env)


# Training on 4 ranks takes many minutes on two cores.
SIZES = [(check, 2) for check in CHECKS] + [(check, 4) for check in CHECKS if check.stem == "check_collectives"]


@pytest.mark.parametrize(("file", "size"), SIZES, ids=[f"{c.stem} on {n}" for c, n in SIZES])
def test_every_rank_passes(file, size, tmp_path):
    argv = [TESTS / "ranks" / "run.py", tmp_path, "-x", "-q", "-p", "no:cacheprovider", file]
    paceline_run(sys.executable, *argv, ranks=size)


def test_statistics_of_batches_travel_as_they_are(tmp_path):
    rules = tmp_path / "rules.json"
    rules.write_text('[{"min_bytes": 1, "codec": "int4"}]')
    file = TESTS / "frameworks" / "tensorflow_ranks" / "check_training.py"
    argv = [TESTS / "ranks" / "run.py", tmp_path, "-x", "-q", "-p", "no:cacheprovider", file, "-k", "batch_normal"]
    paceline_run(sys.executable, *argv, PACELINE_COMPRESSION=str(rules))


def test_gates_among_four_ranks(tmp_path):
    file = TESTS / "frameworks" / "tensorflow_ranks" / "check_sync.py"
    argv = [TESTS / "ranks" / "run.py", tmp_path, "-x", "-q", "-p", "no:cacheprovider", file, "-k", "gate"]
    paceline_run(sys.executable, *argv, ranks=4)


def test_kernels_that_wait_do_not_block_each_other(tmp_path):
    """As with a TensorFlow whose asynchronous kernels are missing or unknown."""
    file = TESTS / "frameworks" / "tensorflow_ranks" / "check_collectives.py"
    argv = [TESTS / "ranks" / "run.py", tmp_path, "-x", "-q", "-p", "no:cacheprovider", file]
    paceline_run(sys.executable, *argv, PACELINE_TENSORFLOW_SYNC="1")


GRADIENTS_IN_ANOTHER_ORDER = """
import tensorflow as tf
import paceline.tensorflow as hvd

v1 = tf.compat.v1
hvd.init()
rank = hvd.rank()


@tf.custom_gradient
def late(x):
    def backward(grad):
        y = tf.fill([1000, 1000], grad[0, 0])
        for _ in range(4):
            y = tf.linalg.matmul(y, y) * 1e-9
        return grad + 0 * y[0, 0]

    return tf.identity(x), backward


with tf.Graph().as_default():
    tables = [v1.get_variable(f"table{i}", initializer=tf.ones([6, 2])) for i in range(2)]
    weights = v1.get_variable("weights", initializer=tf.ones([2]))
    factor = v1.placeholder(tf.float32, [])
    rows = [tf.gather(t, [0, 3]) * factor for t in tables]
    rows[rank] = late(rows[rank])
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
    train = optimizer.minimize(tf.reduce_sum(tf.add_n(rows)) + tf.reduce_sum(weights * factor))
    with v1.Session(config=v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)) as session:
        session.run(v1.global_variables_initializer())
        for _ in range(3):
            session.run(train, {factor: 1.0})
        values = session.run([*tables, weights])
        assert (values[0][[0, 3]] == -2).all() and (values[1][1] == 1).all() and (values[2] == -2).all(), values
"""


def test_kernels_that_wait_reduce_gradients_in_turn_in_a_graph_of_tensorflow_1(tmp_path):
    """They are ready in another order on each rank, whose session has one thread."""
    script = tmp_path / "script.py"
    script.write_text(GRADIENTS_IN_ANOTHER_ORDER)
    paceline_run(sys.executable, script, PACELINE_TENSORFLOW_SYNC="1", PACELINE_STALL_SHUTDOWN="60s")


WITHOUT_EAGER_EXECUTION = """
import numpy as np
import tensorflow as tf

tf.compat.v1.disable_eager_execution()
import paceline.keras as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
tf.keras.utils.set_random_seed(rank)
model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2)])
model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(0.1)), "mse", experimental_run_tf_function=False)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, verbose=1),
]
x = np.random.default_rng(rank).standard_normal((8, 3)).astype(np.float32)
history = model.fit(x, np.ones((8, 2), np.float32), batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
told = hvd.allgather(np.array([history.history["loss"]]))
weights = hvd.allgather(np.array([model.get_weights()[0]]))
assert (told == told[0]).all() and (weights == weights[0]).all(), (told, weights)
assert np.allclose(history.history["lr"], [0.1 / size * (1 + (size - 1) / 2), 0.1]), history.history["lr"]
model.set_weights([np.full((3, 2), rank, np.float32), np.zeros(2, np.float32)])
hvd.broadcast_global_variables(size - 1)
assert (model.get_weights()[0] == size - 1).all() and hvd.allreduce(rank + 1.0) == (size + 1) / 2
"""


def test_keras_2_trains_without_eager_execution(tmp_path):
    import tensorflow as tf

    if hasattr(tf.keras.optimizers.Optimizer, "apply"):
        pytest.skip("Keras 3 is always eager")
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_EAGER_EXECUTION)
    assert "finished gradual learning rate warmup to 0.1." in paceline_run(sys.executable, script)


@pytest.mark.skipif(
    not importlib.util.find_spec("tf_keras"), reason="tf_keras is not installed: TensorFlow has Keras 2"
)
def test_keras_2_beside_keras_3(tmp_path):
    """tf.keras is the package tf_keras."""
    file = TESTS / "frameworks" / "tensorflow_ranks" / "check_training.py"
    argv = [TESTS / "ranks" / "run.py", tmp_path, "-x", "-q", "-p", "no:cacheprovider", file]
    paceline_run(sys.executable, *argv, TF_USE_LEGACY_KERAS="1")


@pytest.mark.parametrize("example", ["tensorflow_digits.py", "keras_digits.py"])
def test_example_learns_and_ranks_hold_the_same_parameters(example):
    said = paceline_run(sys.executable, TESTS.parents[1] / "examples" / example, "--epochs", "6")
    accuracy = float(re.search(r"test accuracy: ([\d.]+)%", said)[1])
    assert accuracy > 90 and "identical" in said and "DIFFERENT" not in said, said


def test_ranks_of_the_example_of_keras_may_run_ahead():
    argv = sys.executable, TESTS.parents[1] / "examples" / "keras_digits.py", "--epochs", "2"
    said = paceline_run(*argv, PACELINE_SYNC="ssp:3")
    assert "identical" in said and "DIFFERENT" not in said, said


FIVE_LINES_BEFORE = """
import tensorflow as tf
model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
optimizer = tf.keras.optimizers.SGD(0.01)
x, y = tf.random.normal([32, 2]), tf.zeros([32, 3])
with tf.GradientTape() as tape:
    loss = tf.reduce_sum((model(x) - y) ** 2)
"""
FIVE_LINES_AFTER = {
    "paceline.tensorflow": "optimizer.apply_gradients(zip(gradients, model.trainable_variables))\n",
    "paceline.keras": "",
}


@pytest.mark.parametrize("module", FIVE_LINES_AFTER)
def test_the_five_lines_of_the_readme(module, tmp_path):
    script = tmp_path / "script.py"
    alike = "ranks = hvd.allgather(model.get_weights()[0][None])\nassert tf.reduce_all(ranks[0] == ranks[1])\n"
    script.write_text(FIVE_LINES_BEFORE + example(module) + FIVE_LINES_AFTER[module] + alike)
    paceline_run(sys.executable, script)


def test_the_overhead_of_operations():
    argv = [TESTS.parents[1] / "bench" / "overhead.py", "tensorflow", "--operations", "8", "--together", "4"]
    said = paceline_run(sys.executable, *argv, "--rounds", "1")
    assert "tensorflow, 2 ranks" in said and "grouped in a function" in said, said


def test_scripts_for_horovod_run_unedited():
    code = """
import horovod.tensorflow, horovod.keras, horovod.tensorflow.keras, horovod.tensorflow.mpi_ops
from horovod.keras import callbacks
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.mpi_ops import allreduce, init, local_rank, rank, size
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
import paceline.tensorflow
assert horovod.tensorflow is paceline.tensorflow
horovod.tensorflow.init()
assert horovod.tensorflow.size() == 2 and float(horovod.keras.allreduce(horovod.keras.rank() * 2.0)) == 1.0
from horovod.tensorflow.elastic import TensorFlowKerasState, TensorFlowState, run
from horovod.keras.elastic import KerasState, CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
import horovod.tensorflow.keras.elastic
assert issubclass(KerasState, TensorFlowKerasState) and horovod.tensorflow.elastic.run is run
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


def test_every_name_says_what_it_takes_and_what_goes_wrong():
    import paceline.keras
    import paceline.tensorflow

    check_docstrings(paceline.tensorflow, operations=9)
    check_docstrings(paceline.keras, operations=4)


# Bad input


def test_an_old_version_is_an_import_error_that_names_what_is_supported():
    code, said = python("""
        import tensorflow as tf
        tf.__version__ = "2.11.1"
        import paceline.tensorflow
    """)
    assert code == 1 and "cannot use TensorFlow 2.11.1: it is too old. It needs 2.12.0 or newer" in said, said


@pytest.mark.parametrize(
    "name",
    [
        "tensorflow.python.autograph.core.config.CONVERSION_RULES",
        "tensorflow.python.framework.auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS",
        "tensorflow.python.framework.auto_control_deps.register_acd_resource_resolver",
        "tensorflow.python.framework.ops.Graph._get_function",
        "tensorflow.keras.layers.BatchNormalization._moments",
    ],
)
def test_a_name_that_a_release_lacks_is_an_import_error_that_names_it(name):
    import tensorflow as tf

    code, said = without(name, "import paceline.tensorflow")
    assert code == 1 and f"ImportError: paceline.tensorflow cannot use TensorFlow {tf.__version__}: " in said, said
    assert name.rpartition(".")[2] in said and "tested with 2.12 to 2.21" in said, said


@pytest.mark.parametrize(
    "name",
    ["tensorflow.keras.optimizers.LossScaleOptimizer", "keras.src.trainers.trainer.model_supports_jit"]
    if metadata.version("keras").startswith("3")
    else ["tensorflow.keras.mixed_precision.LossScaleOptimizer"],
)
def test_a_name_that_a_keras_lacks_is_an_import_error_that_names_it(name):
    code, said = without(name, "import paceline.keras")
    assert code == 1 and "ImportError: paceline.keras cannot use Keras " in said, said
    assert name.rpartition(".")[2] in said and "It is made for Keras 2.12 to 2.15" in said, said


def without(name, code):
    return python(f"""
        import pkgutil
        owner, _, name = "{name}".rpartition(".")
        owner = pkgutil.resolve_name(owner)
        delattr(next(o for o in getattr(owner, "__mro__", [owner]) if name in vars(o)), name)
        {code}
    """)


def test_keras_with_another_backend_is_an_import_error():
    import tensorflow as tf

    if not hasattr(tf.keras.optimizers.Optimizer, "apply"):
        pytest.skip("Keras 2 has TensorFlow alone")
    code, said = python("import paceline.keras", KERAS_BACKEND="numpy")
    assert code == 1 and "set KERAS_BACKEND=tensorflow" in said, said


@pytest.mark.skipif(metadata.version("keras").startswith("2"), reason="TensorFlow has Keras 2")
def test_without_the_keras_2_that_is_asked_for_the_import_says_what_to_install():
    code, said = python("import sys; sys.modules['tf_keras'] = None; import paceline.keras", TF_USE_LEGACY_KERAS="1")
    assert code == 1 and "TF_USE_LEGACY_KERAS asks for another: pip install --no-deps tf_keras" in said, said


def test_without_tensorflow_the_import_says_what_to_install():
    code, said = python("import sys; sys.modules['tensorflow'] = None; import paceline.tensorflow")
    assert code == 1 and "pip install 'paceline[tensorflow]'" in said, said


def test_a_function_that_a_release_lacks_is_an_import_error_that_names_it(tmp_path):
    """A framework library with one function of TensorFlow's C interface."""
    source, library = tmp_path / "few.c", tmp_path / "libtensorflow_framework.so.2"
    source.write_text("void *TF_NewStatus(void) { return 0; }")
    cc = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*cc, "-shared", "-fPIC", "-Wl,-soname," + library.name, source, "-o", library], check=True)
    code, said = python(f"""
        import ctypes, sys, types
        ctypes.CDLL({str(library)!r})
        tf = types.ModuleType("tensorflow")
        tf.__version__, tf.load_op_library = "2.99.0", ctypes.CDLL
        tf.errors = types.SimpleNamespace(OpError=OSError)
        sys.modules["tensorflow"] = tf
        import paceline.tensorflow
    """)
    assert code == 1 and "cannot use TensorFlow 2.99.0: the function TF_DeleteStatus is missing" in said, said
    assert "tested with 2.12" in said, said


def test_what_has_no_kernel_is_an_error_that_names_the_operation():
    code, said = python("""
        import tensorflow as tf
        import paceline.tensorflow as hvd
        hvd.init()
        for call in (
            lambda: tf.function(lambda: hvd.allreduce(tf.ones([2])), jit_compile=True)(),
            lambda: hvd.allreduce(tf.constant(["text"])),
            lambda: hvd.allreduce(tf.constant([True])),
        ):
            try:
                call()
            except (tf.errors.OpError, ValueError) as e:
                print(type(e).__name__, e)
            else:
                print("no error")
        tf.config.set_soft_device_placement(False)
        try:
            with tf.device("GPU:0"):
                hvd.allreduce(tf.ones([2]))
        except (tf.errors.InvalidArgumentError, RuntimeError) as e:
            print("device:", e)
    """)
    assert code == 0 and "no error" not in said, said
    assert "PacelineExchange" in said and "cast it first" in said and "device:" in said, said


def test_operations_before_init_are_an_error():
    code, said = python("import tensorflow as tf, paceline.tensorflow as hvd; hvd.allreduce(tf.ones([2]))")
    assert code == 1 and "call hvd.init() first" in said, said


@pytest.mark.parametrize(
    ("framework", "of", "total"),
    [
        ("torch", ".venv", "hvd.allreduce(torch.ones(3) * i, op=hvd.Sum)"),
        ("jax", "build/jax", "jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(jax.numpy.ones(3) * i)"),
    ],
)
def test_another_framework_and_tensorflow_in_one_process(framework, of, total):
    """It may be that of another environment of the checkout: the one of this test seldom has both."""
    packages = TESTS.parents[1] / of / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    code = f"""
        import sys
        import tensorflow as tf
        sys.path.append({str(packages)!r})
        try:
            import {framework}
        except ImportError as e:
            print("cannot import {framework}:", e)
            raise SystemExit(0)
        import paceline.tensorflow as tvd
        import paceline.{framework} as hvd
        hvd.init()
        assert tvd.size() == 2
        total = tf.function(lambda x: tvd.allreduce(x, op=tvd.Sum))
        for i in range(20):
            assert ({total} == 2.0 * i).all()
            assert (total(tf.ones([3]) * i).numpy() == 2.0 * i).all()
        tvd.shutdown()
        assert not hvd.is_initialized()
        print("both work")
    """
    said = paceline_run(sys.executable, "-c", textwrap.dedent(code))
    if "cannot import" in said:
        pytest.skip(said)
    assert said.count("both work") == 2, said


# The end of a process


ENDS = """
import signal, sys, threading
import tensorflow as tf
import paceline.tensorflow as hvd

what = sys.argv[1]
tf.config.experimental.set_synchronous_execution(what != "eagerly in flight")
hvd.init()
rank = hvd.rank()


@tf.function
def many(x):
    return tf.add_n([hvd.allreduce(x * i, op=hvd.Sum, name=f"in flight.{i}") for i in range(8)])


def wait():
    try:
        many(tf.ones([4]))
    except tf.errors.UnknownError as e:
        print("failed:", "in flight." in str(e) or "init" in str(e), flush=True)  # the name, or that the job has ended


@tf.function
def broken(x):
    sums = [hvd.allreduce(x * i, op=hvd.Sum, name=f"broken.{i}") for i in range(8)]
    smaller = tf.debugging.Assert(tf.reduce_sum(x) < (0.0 if rank == 0 else 99.0), ["not smaller"])
    with tf.control_dependencies([smaller]):
        return tf.add_n(sums) + hvd.allreduce(tf.identity(x), name="in flight.late")


many(tf.ones([4])).numpy()  # to its end, also where operations run asynchronously
hvd.barrier()
if what == "a thread waits when the program ends" and rank == 0:
    threading.Thread(target=wait, daemon=True).start()
elif what == "a thread waits at shutdown" and rank == 0:
    thread = threading.Thread(target=wait)
    thread.start()
    hvd.shutdown()
    thread.join()
elif what == "a rank ends" and rank == 0:
    wait()
elif what == "a rank is killed":
    print("ready", flush=True)  # only now: a rank that is killed earlier may owe the other the end of the barrier
    if rank == 1:
        signal.pause()
    wait()
elif what == "an exception in a graph":
    try:
        broken(tf.ones([4]))
    except tf.errors.InvalidArgumentError as e:
        print("failed:", "not smaller" in str(e), flush=True)
    except tf.errors.UnknownError as e:  # of an operation that the other rank had not begun, or of the last
        print("failed:", "in flight.late" in str(e) or "broken." in str(e), flush=True)
elif what == "eagerly in flight" and rank == 0:
    hvd.allreduce(tf.ones([4]), name="in flight.eagerly")
print("ends", flush=True)
"""
MUST_FAIL = {  # the ranks that see an operation fail before they end; the other may see one, or end first
    "a thread waits when the program ends": [],
    "a thread waits at shutdown": [0],
    "a rank ends": [0],
    "a rank is killed": [0],
    "an exception in a graph": [0, 1],
    "eagerly in flight": [],
}


WAITING = ["a thread waits at shutdown", "an exception in a graph"]


@pytest.mark.parametrize(
    ("what", "sync"),
    [(what, "0") for what in MUST_FAIL] + [(what, "1") for what in WAITING],
    ids=list(MUST_FAIL) + [f"{what}, in kernels that wait" for what in WAITING],
)
def test_a_process_ends_whatever_is_in_flight(what, sync, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ENDS)
    with Job(2, [script, what], tmp_path, fresh=True, **SETTINGS, PACELINE_TENSORFLOW_SYNC=sync) as job:
        if what == "a rank is killed":
            wait_until_printed(job, "ready")
            job.kill(1)
        ended = job.wait()
    survivors = [0] if what == "a rank is killed" else [0, 1]
    assert all(ended[r].status == 0 and "ends" in ended[r].output for r in survivors), ended
    assert all("failed: True" in ended[r].output for r in MUST_FAIL[what]), ended
    assert not any("failed: False" in end.output for end in ended), ended


# Elastic jobs

WITHOUT_RANK_1 = """
import os, signal
import tensorflow as tf
import paceline.tensorflow as hvd

hvd.init()
rank = hvd.rank()
if rank == 1:
    hvd.allreduce(tf.ones([1]), op=hvd.Sum, name="there")
    os.kill(os.getpid(), signal.SIGKILL)
while hvd.allreduce(tf.ones([1]), op=hvd.Sum, name="there") != 2:
    pass


def both():
    x = tf.ones([rank + 1, 2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = hvd.allgather(x) * tf.range(4.0)[:, None] * (rank + 1.0)
    slices = tf.IndexedSlices(tf.fill([1, 2], rank + 2.0), tf.constant([rank]), dense_shape=[3, 2])
    return tape.gradient(y, x), tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Average))


own, shared = tf.Variable([8.0]), tf.Variable([1.0])
rows = tf.Variable(tf.ones([3, 2]))


def local():
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = own * 3.0 + shared * (rank + 1.0) + tf.reduce_sum(tf.gather(rows, [1]))
    for source in (own, rows):
        tape.register_local_source(source)
    return tape.gradient(loss, [own, shared, rows])


for run in (local, tf.function(local)):
    grads = [tf.convert_to_tensor(g).numpy().tolist() for g in run()]
    assert grads == [[1.5], [2.0], [[0, 0], [0.5, 0.5], [0, 0]]], grads
for run in (both, tf.function(both)):
    grad, mean = run()
    assert grad[:, 0].numpy().tolist() == ([0] if rank == 0 else [2, 4, 6]), grad
    assert mean[:, 0].numpy().tolist() == [1, 0, 2], mean
print("done", rank)
"""


def test_gradients_and_sparse_means_are_the_survivors(tmp_path):
    goes_on(WITHOUT_RANK_1, tmp_path, killed=1, fresh=True, **SETTINGS)


IN_THE_MIDDLE = """
import os, random, signal, threading, time
import tensorflow as tf
import paceline.tensorflow as hvd

hvd.init()
rank = hvd.rank()


def die():
    time.sleep(0.02 * random.random())  # about a step: it comes anywhere in one
    os.kill(os.getpid(), signal.SIGKILL)


def gathered(step):
    mine = tf.repeat(rank, rank + 1)
    slices = tf.IndexedSlices(tf.ones([rank + 1, 100, 100], tf.float16), mine, dense_shape=[3, 100, 100])
    mean = hvd.allreduce(slices, op=hvd.Average)
    return mean.indices, mean.values, hvd.broadcast(tf.fill([1000], step + float(rank)), 2)


compiled = tf.function(gathered)
for step in range(40):
    if step == 20 and rank == 1:
        threading.Thread(target=die).start()
    for run in (gathered, compiled):
        indices, values, data = run(tf.constant(float(step)))
        alive = sorted(set(indices.numpy().tolist()))
        assert indices.numpy().tolist() == [r for r in alive for _ in range(r + 1)], indices
        share = tf.constant(1.0 / len(alive), tf.float16)
        assert values.shape == (len(indices), 100, 100) and tf.reduce_all(tf.abs(values - share) < 1e-3), values
        assert tf.reduce_all(data == step + 2.0), data
        seen = dict(hvd.allgather_object((rank, alive)))
        assert seen[0] == seen[2], seen
assert alive == [0, 2], alive
print("done", rank)
"""


def test_sparse_means_and_broadcasts_go_on_where_a_rank_is_killed_in_the_middle(tmp_path):
    goes_on(IN_THE_MIDDLE, tmp_path, killed=1, fresh=True, **SETTINGS)


WITHOUT_RANK_0 = """
import os, signal
import keras, numpy as np
import tensorflow as tf
import paceline
import paceline.tensorflow as hvd
import paceline.tensorflow.keras as hvd_keras

hvd.init()
rank = hvd.rank()
if rank == 0:
    hvd.allreduce(tf.ones([1]), op=hvd.Sum, name="there")
    os.kill(os.getpid(), signal.SIGKILL)
while hvd.allreduce(tf.ones([1]), op=hvd.Sum, name="there") != 2:
    pass
keras.utils.set_random_seed(rank)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), sync=paceline.SSP(1))
model.compile(optimizer, "mse", jit_compile=False)
model.fit(np.full([8, 3], rank + 1.0), np.ones([8, 2]), batch_size=4, epochs=2, verbose=0)
optimizer.agree()
weights = hvd.allgather(tf.reshape(model.get_weights()[0], [1, -1]))
assert tf.reduce_all(weights[0] == weights[1]), weights
print("done", rank)
"""


def test_servers_hold_parameters_after_the_loss_of_rank_0(tmp_path):
    goes_on(WITHOUT_RANK_0, tmp_path, killed=0, fresh=True, **SETTINGS)


# Elastic training

ELASTIC = Path(__file__).with_name("tensorflow_elastic_job.py")


@pytest.mark.parametrize("by", ["tape", "fit"])
def test_the_others_go_on_from_the_last_commit_and_a_later_host_joins(by, tmp_path):
    hosts, script = tmp_path / "hosts", tmp_path / "discover.sh"
    hosts.write_text("localhost:3\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    flags = ["--min-np", "2", "--max-np", "4", "--host-discovery-script", str(script), "--horovod"]
    flags += ["--blacklist-cooldown-range", "0.2", "1"]
    command = [sys.executable, "-X", "faulthandler", str(ELASTIC), str(tmp_path), by]
    with Elastic(tmp_path, *flags, script=command, **SETTINGS) as job:
        (first,) = job.wait(lambda: job.rounds(3))
        job.wait(lambda: len({m["rank"] for m in job.said("committed")}) == 3)
        replace(hosts, "localhost:2\n")
        job.kill(next(m for m in first if m["rank"] == 0))
        members = job.wait(lambda: [r for r in job.rounds(2) if all(m["step"] > 0 for m in r)])[0]
        others = [m for m in members if m["process"] < 3]  # a new one is there if the launcher saw the hosts first
        assert others and all(m["resets"] >= 1 for m in others), members
        replace(hosts, "localhost:4\n")
        job.wait(lambda: job.rounds(4))
        assert job.finish() == 0, job.text()
    end_alike(job, 4)
