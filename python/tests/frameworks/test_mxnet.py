"""paceline.mxnet: runs each file of mxnet_ranks/ under 2 and 4 ranks, the example, and what is wrong at import."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from docstrings import check_docstrings
from jobs import HANG_S, clean_environment, example, goes_on, reserved_port

pytest.importorskip("mxnet", reason="MXNet is not installed here: make test-mxnet")

TESTS = Path(__file__).parents[1]
CHECKS = sorted((TESTS / "frameworks" / "mxnet_ranks").glob("check_*.py"))


def run(*argv, **env):
    with reserved_port() as port:
        done = subprocess.run(
            [*map(str, argv)],
            env=clean_environment() | {"PACELINE_PORT": str(port), "OMP_NUM_THREADS": "1"} | env,
            cwd=TESTS.parents[1],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
    return done.returncode, done.stdout + done.stderr


def on_ranks(size, *argv, **env):
    """What a script says on so many ranks, on which it succeeds."""
    code, said = run("paceline", "run", "-np", size, *argv, **env)
    assert code == 0, said[-12000:]
    return said


def checks(file, tmp_path):
    return [
        sys.executable,
        TESTS / "ranks" / "run.py",
        tmp_path,
        "-x",
        "-q",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
        file,
    ]


@pytest.mark.parametrize("size", [2, 4], ids=["2 ranks", "4 ranks"])
@pytest.mark.parametrize("file", CHECKS, ids=[c.stem for c in CHECKS])
def test_every_rank_passes(file, size, tmp_path):
    on_ranks(size, *checks(file, tmp_path))


ENDS = """
import sys, time
import mxnet as mx
import paceline.mxnet as hvd

hvd.init()
w = mx.nd.ones((200, 200))
hvd.allreduce(w, name="at the end").wait_to_read()
if sys.argv[1] == "all" or hvd.rank() == 0:
    for _ in range(20 if sys.argv[1] == "all" else 1):
        w = hvd.allreduce(mx.nd.dot(w, w) / 200, name="at the end")
else:
    time.sleep(1.0)  # the other is at its end by now
if sys.argv[1] == "all" and hvd.rank() == 0:
    mx.nd.save(sys.argv[2], w)
if sys.argv[1] == "raises":
    raise ValueError("of the script")
"""


@pytest.mark.parametrize("what", ["all", "one rank goes on", "raises"])
def test_a_script_may_end_without_shutdown(what, tmp_path):
    """What it has pushed is done first, as without Paceline; of what cannot be there is a warning."""
    script, saved = tmp_path / "script.py", tmp_path / "saved"
    script.write_text(ENDS)
    code, said = run("paceline", "run", "-np", "2", sys.executable, script, what, saved)
    assert (code != 0) == (what == "raises") and "Exception ignored" not in said, said
    assert saved.exists() == (what == "all") and (not saved.exists() or saved.stat().st_size > 4 * 200 * 200)
    fails = what == "one rank goes on"
    assert said.count("what was in flight at the end of the process failed: ") == fails, said
    assert ('"at the end" cannot be done: rank 1 has shut down' in said) == fails, said


def test_the_engine_for_debugging_waits_for_each_operation(tmp_path):
    on_ranks(
        2,
        *checks(CHECKS[0], tmp_path),
        "-k",
        "not any_order and not failed and not failure and not refused and not queued",
        MXNET_ENGINE_TYPE="NaiveEngine",
    )


def test_the_example_learns_the_digits_on_two_workers():
    said = on_ranks(2, sys.executable, "examples/mxnet_digits.py", "--epochs", "8")
    assert float(re.search(r"test accuracy: +(\d+\.\d+)%", said)[1]) > 95
    assert re.search(r"throughput: +[\d,]+ images/s over 2 workers", said)
    assert "parameters:    identical on all workers" in said


def test_ranks_of_the_example_may_run_ahead():
    said = on_ranks(2, sys.executable, "examples/mxnet_digits.py", "--epochs", "2", PACELINE_SYNC="ssp:3")
    assert "parameters:    identical on all workers" in said


def test_the_five_lines_of_the_readme(tmp_path):
    before = """
import mxnet as mx
net = mx.gluon.nn.Dense(3, in_units=2)
net.initialize(mx.init.Normal())
"""
    after = """
for _ in range(5):
    with mx.autograd.record():
        loss = (net(mx.nd.ones((4, 2)) * (hvd.rank() + 1)) ** 2).sum()
    loss.backward()
    trainer.step(4)
ranks = hvd.allgather(net.weight.data().reshape((1, 3, 2))).asnumpy()
assert (ranks[0] == ranks[1]).all()
"""
    script = tmp_path / "script.py"
    script.write_text(before + example("paceline.mxnet") + after)
    on_ranks(2, sys.executable, script)


def test_a_script_for_horovod_runs_unedited():
    code = """
    import mxnet as mx
    import horovod.mxnet as hvd
    from horovod.mxnet.functions import allgather_object, broadcast_object
    from horovod.mxnet.mpi_ops import allreduce_, init, rank, size
    from horovod.common.util import check_extension, gpu_available
    check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", hvd.__file__, "mpi_lib")
    assert not gpu_available("mxnet")
    init()
    assert size() == hvd.size() == 2 and hvd.allreduce(mx.nd.ones((2,)), average=False).asnumpy().tolist() == [2, 2]
    """
    on_ranks(2, "--horovod", sys.executable, "-c", textwrap.dedent(code))


def test_every_name_of_horovod_is_there():
    import paceline.mxnet as hvd

    # fmt: off
    names = [
        "init", "shutdown", "is_initialized", "start_timeline", "stop_timeline", "size", "local_size", "cross_size",
        "rank", "local_rank", "cross_rank", "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled",
        "gloo_built", "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built", "ProcessSet",
        "global_process_set", "add_process_set", "remove_process_set", "Compression", "Average", "Sum", "Adasum", "Min",
        "Max", "Product", "DistributedOptimizer", "DistributedTrainer", "broadcast_parameters", "allreduce",
        "allreduce_", "grouped_allreduce", "grouped_allreduce_", "allgather", "grouped_allgather", "broadcast",
        "broadcast_", "alltoall", "reducescatter", "grouped_reducescatter", "allgather_object", "broadcast_object",
        "split_list",
    ]
    # fmt: on
    assert [name for name in names if not hasattr(hvd, name) or name not in hvd.__all__] == []


@pytest.mark.parametrize(
    ("before", "error"),
    [
        ("import sys; sys.modules['mxnet'] = None", "pip install 'paceline[mxnet]'"),
        ("import mxnet; mxnet.__version__ = '2.0.0'", "does not know MXNet 2.0.0. paceline.mxnet is tested with"),
        (
            "import ctypes, mxnet.base; mxnet.base._LIB = ctypes.CDLL('libm.so.6')",
            "MXNet 1.9.1 has no MXEnginePushAsyncND. paceline.mxnet is tested with MXNet 1.9.1",
        ),
        (
            "import numpy; numpy.__deprecated_attrs__.pop('bool', None)",
            "MXNet cannot be imported: module 'numpy' has no attribute 'bool'. paceline.mxnet is tested with MXNet",
        ),
    ],
    ids=["missing", "unknown version", "without a symbol", "a new NumPy"],
)
def test_an_unusable_mxnet_is_an_import_error_that_says_what_to_do(before, error):
    code, said = run(sys.executable, "-c", f"{before}\nimport paceline.mxnet")
    assert code == 1 and "ImportError" in said.replace("ModuleNotFoundError", "ImportError") and error in said, said


def test_an_operation_before_init_is_an_error():
    code, said = run(sys.executable, "-c", "import mxnet as mx, paceline.mxnet as h; h.allreduce_(mx.nd.ones(3))")
    assert code == 1 and "call hvd.init() first" in said, said


def test_every_name_says_what_it_takes_and_what_goes_wrong():
    import paceline.mxnet as hvd

    check_docstrings(hvd, operations=11)


WITHOUT_RANK_0 = """
import os, signal
import mxnet as mx, numpy as np
from mxnet import autograd, gluon
import paceline.mxnet as hvd

hvd.init()
rank = hvd.rank()


def trained(sync):
    mx.random.seed(rank)
    net = gluon.nn.Dense(1, in_units=3)
    net.initialize(mx.init.Xavier())
    before = net.bias.data().asnumpy()
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, sync=sync, prefix=sync)
    for _ in range(3):
        with autograd.record():
            loss = net(mx.nd.ones((1, 3))) * (rank + 1)
        loss.backward()
        trainer.step(1)
    return trainer, net, net.bias.data().asnumpy() - before


_, _, moved = trained("bsp")
np.testing.assert_allclose(moved, -3 * 2.0, rtol=1e-5)  # the mean of 1, 2 and 3
if rank == 0:
    hvd.allreduce(mx.nd.ones(1), average=False, name="there").wait_to_read()
    os.kill(os.getpid(), signal.SIGKILL)
while hvd.allreduce(mx.nd.ones(1), average=False, name="there").asscalar() != 2:
    pass
_, _, moved = trained("bsp")
np.testing.assert_allclose(moved, -3 * 2.5, rtol=1e-5)
trainer, net, _ = trained("ssp:1")
trainer.agree()
first, second = hvd.allgather_object(net.weight.data().asnumpy())
assert (first == second).all(), (first, second)
print("done", rank, flush=True)
"""


def test_training_and_held_parameters_go_on_without_rank_0(tmp_path):
    goes_on(WITHOUT_RANK_0, tmp_path, killed=0, fresh=True)
