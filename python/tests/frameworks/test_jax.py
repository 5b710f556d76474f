"""paceline.jax: runs each file of jax_ranks/ under 2 and under 4 ranks, the example, and what is wrong at import."""

import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from docstrings import check_docstrings
from elastic_runs import Elastic, end_alike, replace
from jobs import HANG_S, Job, clean_environment, example, goes_on

jax = pytest.importorskip("jax", reason="JAX is not installed here: make test-jax")

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parents[1]
CHECKS = sorted((Path(__file__).parent / "jax_ranks").glob("check_*.py"))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Settings of JAX by which 4 ranks need not compile what 2 ranks have compiled: that takes longer than all else."""
    folder = str(tmp_path_factory.mktemp("compiled"))
    return {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


@pytest.mark.parametrize("size", [2, 4], ids=["2 ranks", "4 ranks"])
@pytest.mark.parametrize("file", CHECKS, ids=[c.stem for c in CHECKS])
def test_every_rank_passes(file, size, tmp_path, compiled):
    # -x: after a failed check the ranks no longer run the same operations.
    argv = [TESTS / "ranks" / "run.py", tmp_path, "-x", "-q", "-p", "no:cacheprovider", file]
    with Job(size, argv, tmp_path, fresh=True, JAX_PLATFORMS="cpu", **compiled) as job:
        ended = job.wait()
    problems = []
    for rank, end in enumerate(ended):
        report = tmp_path / f"rank{rank}.xml"
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
        failed = [
            (case.get("name"), p.text) for case in cases for kind in ("failure", "error") for p in case.iter(kind)
        ]
        problems += [f"rank {rank}, {name}:\n{text}" for name, text in failed]
        if not failed and (end.status or not cases):
            problems.append(f"rank {rank} ended with {end.status} after {len(cases)} checks:\n{end.output[-4000:]}")
    assert not problems, "\n\n".join(problems)


def run(*argv, **env):
    done = subprocess.run(
        argv,
        env=clean_environment() | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"} | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def python(code, **env):
    return run(sys.executable, "-c", textwrap.dedent(code), **env)


def test_the_example_learns_the_digits_on_two_workers():
    code, said = run("paceline", "run", "-np", "2", sys.executable, "examples/jax_digits.py", "--epochs", "10")
    assert code == 0, said
    assert float(re.search(r"test accuracy: (\d+\.\d+)%", said)[1]) > 95
    assert re.search(r"throughput: +[\d,]+ images/s over 2 workers", said)
    assert "parameters:    identical on all workers" in said


def test_an_elastic_training_goes_on_when_a_rank_is_killed_and_hosts_come(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:3\n")
    script = [sys.executable, str(TESTS / "frameworks" / "jax_elastic_job.py"), str(tmp_path)]
    flags = ("--min-np", "2", "--max-np", "3", "--host-discovery-script", f"cat {hosts}")
    with Elastic(tmp_path, *flags, script=script, JAX_PLATFORMS="cpu") as job:
        (first,) = job.wait(lambda: job.rounds(3))
        job.kill(next(m for m in first if m["rank"] == 0))
        members = job.wait(lambda: job.rounds(2))[0]
        assert sorted(m["rank"] for m in members) == [0, 1] and all(m["resets"] == 1 for m in members)
        replace(hosts, "localhost:3\n127.0.0.1:1\n")
        job.wait(lambda: [r for r in job.rounds(3) if any(m["process"] > 2 for m in r)])
        assert job.finish() == 0, job.text()
    end_alike(job, 3)
    assert "going back to what was committed last" in job.text()


WITHOUT_RANK_1 = """
import os, signal
import jax, jax.numpy as jnp
import paceline.jax as hvd
from paceline.jax import _glue

hvd.init()
rank = hvd.rank()
if rank == 1:
    hvd.allreduce(jnp.ones(1), op=hvd.Sum, name="there").block_until_ready()
    os.kill(os.getpid(), signal.SIGKILL)
while hvd.allreduce(jnp.ones(1), op=hvd.Sum, name="there") != 2:
    pass
weights = jnp.arange(4.0)[:, None] * (rank + 1.0)
grad = jax.grad(lambda x: (hvd.allgather(x) * weights).sum())(jnp.ones((rank + 1, 2)))
assert grad[:, 0].tolist() == ([0] if rank == 0 else [2, 4, 6]), grad
for handler in _glue.has_handler, lambda: False:
    _glue.has_handler = handler
    try:
        jax.jit(lambda x: hvd.allgather(x))(jnp.ones((1, 2))).block_until_ready()
    except Exception as error:
        assert "has lost 1 of the 3 ranks of the process set, with the one at place 1" in str(error), error
        assert "HorovodInternalError" in str(error), error  # by which elastic training knows it
    else:
        raise AssertionError("rows of the lost rank came")
    hvd.barrier()
print("done", rank)
"""


def test_gradients_of_gathers_are_the_survivors(tmp_path):
    goes_on(WITHOUT_RANK_1, tmp_path, killed=1, fresh=True, JAX_PLATFORMS="cpu")


WITHOUT_RANK_0 = """
import os, signal
import jax, jax.numpy as jnp, numpy as np, optax
import paceline
import paceline.jax as hvd

hvd.init()
rank = hvd.rank()
if rank == 0:
    hvd.allreduce(jnp.ones(1), op=hvd.Sum, name="there").block_until_ready()
    os.kill(os.getpid(), signal.SIGKILL)
while hvd.allreduce(jnp.ones(1), op=hvd.Sum, name="there") != 2:
    pass
optimizer = hvd.distributed_optimizer(optax.sgd(0.1), sync=paceline.SSP(1))
params = {"w": jnp.full(5, rank + 1.0)}
state = optimizer.init(params)
for _ in range(3):
    updates, state = optimizer.update({"w": jnp.full(5, rank + 1.0)}, state, params)
    params = optax.apply_updates(params, updates)
params = optimizer.agree(params)
weights = hvd.allgather(params["w"][None])
assert np.array_equal(weights[0], weights[1]), weights
print("done", rank)
"""


def test_servers_hold_parameters_after_the_loss_of_rank_0(tmp_path):
    goes_on(WITHOUT_RANK_0, tmp_path, killed=0, fresh=True, JAX_PLATFORMS="cpu")


ENDS = """
import sys, time
import jax, jax.numpy as jnp
import paceline.jax as hvd

hvd.init()
w = jnp.ones((200, 200)) / 200


@jax.jit
def step(w):
    for _ in range(20):
        w = hvd.allreduce(w @ w, name="at the end")
    return w


jax.block_until_ready(step(w))
hvd.barrier()
if sys.argv[1] == "all" or hvd.rank() == 0:
    for _ in range(20 if sys.argv[1] == "all" else 1):
        w = step(w)
else:
    time.sleep(1.0)  # the other is at its end by now
if sys.argv[1] == "raises":
    raise ValueError("of the script")
"""

# JAX up to 0.4.31 runs a program with a Python callback within the call; later ones let the script go on.
RUN_IN_THE_CALL = jax.__version_info__ <= (0, 4, 31)


@pytest.mark.parametrize("what", ["all", "one rank goes on", "raises"])
def test_a_script_may_end_without_shutdown(what, tmp_path):
    """Programs in flight are finished first, as without Paceline; of one that cannot be there is a warning."""
    script = tmp_path / "script.py"
    script.write_text(ENDS)
    code, said = run("paceline", "run", "-np", "2", sys.executable, script, what)
    alone = what != "all"
    warns, raises = alone and not RUN_IN_THE_CALL and what != "raises", alone and RUN_IN_THE_CALL
    assert (code != 0) == (raises or what == "raises") and "Exception ignored" not in said, said
    assert said.count("what was in flight at the end of the process failed: ") == warns, said
    assert ('"at the end" cannot be done: rank 1 has shut down' in said) == (warns or raises), said


BLOCKS = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs/jax.md").read_text(), re.M | re.S)
README = (
    "params = {'w': params['w'] * (hvd.rank() + 1)}\n"
    + example("paceline.jax")
    + """
for _ in range(5):
    updates, state = optimizer.update(jax.grad(loss_of)(params, images, labels), state, params)
    params = optax.apply_updates(params, updates)
ranks = hvd.allgather(params["w"][None])
assert (ranks[0] == ranks[1]).all() and (ranks[0] != 1).all()
"""
)
BEFORE = """
import jax
import jax.numpy as jnp
import optax

import paceline
import paceline.jax as hvd

hvd.init()
params = {"w": jnp.ones((64, 32))}
images, labels = jnp.ones((16, 64)) * (hvd.rank() + 1), jnp.zeros((16, 32))


def loss_of(params, images, labels):
    return ((images @ params["w"] - labels) ** 2).mean()


"""


@pytest.mark.parametrize("block", [*BLOCKS, README], ids=[*map(str, range(len(BLOCKS))), "README"])
def test_an_example_of_the_documentation(block, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BEFORE + block + "\nhvd.shutdown()\n")
    code, said = run("paceline", "run", "-np", "2", sys.executable, script)
    assert code == 0, said


def test_an_old_version_is_an_import_error_that_names_it():
    code, said = python("""
        import jax
        jax.__version__, jax.__version_info__ = "0.3.25", (0, 3, 25)
        import paceline.jax
    """)
    assert code == 1 and "JAX 0.3.25 is too old for paceline.jax, which is tested with 0.4.18" in said, said


@pytest.mark.parametrize(
    "name",
    [
        "jax.ffi.register_ffi_target",
        "jax._src.effects",
        "jax._src.effects.Effect",
        "jax._src.effects.remat_allowed_effects",
        "jax._src.dispatch.runtime_tokens",
        "jax._src.dispatch.runtime_tokens.current_tokens",
    ],
)
def test_a_version_without_a_name_that_is_used_is_an_import_error_that_names_it(name):
    if name.startswith("jax.ffi"):
        pytest.importorskip("jax.ffi", reason="this JAX has no jax.ffi, and a Python callback in its place")
    code, said = python(f"""
        import pkgutil, sys
        owner, _, name = "{name}".rpartition(".")
        owner = pkgutil.resolve_name(owner)
        if "{name}" in sys.modules:
            sys.modules["{name}"] = None
        vars(owner).pop(name, None)
        import paceline.jax
    """)
    assert code == 1 and f"ImportError: paceline.jax does not know JAX {jax.__version__}" in said, said
    assert "it is tested with 0.4." in said, said


def test_without_jax_the_import_says_what_to_install():
    code, said = python("""
        import sys
        sys.modules["jax"] = None
        import paceline.jax
    """)
    assert code == 1 and "pip install 'paceline[jax]'" in said, said


def test_operations_before_init_are_an_error():
    code, said = python("""
        import paceline.jax as hvd
        for call in (lambda: hvd.allreduce(1.0), hvd.barrier, hvd.rank):
            try:
                call()
            except hvd.HorovodInternalError as e:
                print(e)
    """)
    assert code == 0 and said.count("call hvd.init() first") == 3, said


def test_a_program_on_several_devices_is_an_error():
    """As docs/jax.md says: also where all have the whole array; pmap works on one device, from JAX 0.8 on."""
    code, said = python(
        """
        import jax, jax.numpy as jnp, numpy as np
        import paceline.jax as hvd
        hvd.init()
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
        specs = [jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()]
        arrays = [jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, spec)) for spec in specs]
        for program, x in [(jax.jit, arrays[0]), (jax.jit, arrays[1]), (jax.pmap, jnp.ones((2, 4)))]:
            try:
                jax.block_until_ready(program(hvd.allreduce)(x))
            except ValueError as e:
                print("said:", e)
        try:
            print("one:", jax.pmap(hvd.allreduce)(jnp.ones((1, 4))))
        except ValueError as e:
            print("one:", e)
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    errors, one = 3, "[[1. 1. 1. 1.]]"
    if jax.__version_info__ < (0, 8):
        errors, one = 2, "Ordered effects not supported in `pmap`."
    assert code == 0 and said.count("not supported for more than 1 device: [Paceline]") == errors, said
    assert said.count("said:") == 3 and f"one: {one}" in said, said


def test_torch_and_jax_in_one_process():
    # This environment has none: that of the checkout, behind this one's own packages.
    torch = next((ROOT / ".venv" / "lib").glob(f"python3.{sys.version_info[1]}/site-packages/torch"), None)
    if torch is None:
        pytest.skip("the checkout has no environment with PyTorch: make setup")
    before = f"import sys; sys.path.append({str(torch.parent)!r})"
    code, said = python(f"""
        {before}
        import torch, jax, jax.numpy as jnp
        import paceline.torch as hvd
        import paceline.jax as jvd
        hvd.init()
        assert jvd.size() == 1
        for i in range(20):
            assert torch.equal(hvd.allreduce(torch.ones(3) * i), torch.ones(3) * i)
            assert (jax.jit(jvd.allreduce)(jnp.ones(3) * i) == i).all()
        jvd.shutdown()
        assert not hvd.is_initialized()
    """)
    assert code == 0, said


def test_importing_paceline_imports_no_jax_and_no_glue():
    code, said = python("""
        import sys, paceline
        assert "jax" not in sys.modules
        import paceline.jax as hvd
        hvd.init()
        hvd.allreduce(1.0)
        assert "libpaceline_jax" not in open("/proc/self/maps").read()  # until a program needs it
    """)
    assert code == 0, said


def test_every_name_says_what_it_takes_and_what_goes_wrong():
    import paceline.jax as hvd

    check_docstrings(hvd, operations=8)


def test_arrays_on_several_devices_and_those_that_are_gone():
    """Outside of programs an array may lie on several devices; a donated one has no elements."""
    code, said = python(
        """
        import jax, jax.numpy as jnp, numpy as np
        import paceline.jax as hvd
        hvd.init()
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
        x = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
        assert hvd.allreduce(x).sharding == x.sharding
        x.delete()
        try:
            hvd.allreduce(x)
        except RuntimeError as e:
            print("said:", e)
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert code == 0 and "said: Array has been deleted" in said, said


def test_results_outside_of_programs_lie_where_their_arrays_have_to(tmp_path):
    """What JAX may move stays so, and a result of another shape does not have the shares of its array."""
    script = tmp_path / "script.py"
    script.write_text("""
import jax, jax.numpy as jnp, numpy as np
import paceline.jax as hvd

hvd.init()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
sharded = jax.device_put(jnp.ones((6, 3)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
there = jax.device_put(jnp.ones((2, 3)), jax.devices()[1])
operations = [hvd.broadcast_parameters, hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter]
for operation in operations:
    free = operation(jnp.ones((6, 3)))
    assert jax.jit(lambda a, b: a.sum() + b.sum())(free, sharded) > 0
    assert operation(there).devices() == there.devices(), operation
    assert (np.asarray(operation(sharded)) == 1).all()
assert hvd.allreduce(sharded).sharding == sharded.sharding
hvd.shutdown()
""")
    flags = "--xla_force_host_platform_device_count=2"
    code, said = run("paceline", "run", "-np", "2", sys.executable, script, XLA_FLAGS=flags)
    assert code == 0, said
