"""The package itself: importing, its version, and its substitute for the package horovod."""

import ast
import os
import re
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
from jobs import HANG_S

import paceline
from paceline.common import abi, objects
from paceline.common.engine import engine

# fmt: off
NAMES = [
    "init", "shutdown", "is_initialized", "start_timeline", "stop_timeline", "size", "local_size", "cross_size",
    "rank", "local_rank", "cross_rank", "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled",
    "gloo_built", "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built", "paceline_built",
    "ProcessSet", "global_process_set", "add_process_set", "remove_process_set", "Compression", "Average", "Sum",
    "Adasum", "Min", "Max", "Product", "HorovodInternalError", "DistributedOptimizer", "SyncBatchNorm", "allreduce",
    "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "sparse_allreduce_async", "allgather", "allgather_async",
    "grouped_allgather", "grouped_allgather_async", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "alltoall", "alltoall_async", "reducescatter", "reducescatter_async",
    "grouped_reducescatter", "grouped_reducescatter_async", "join", "barrier", "poll", "synchronize",
    "allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "compression",
    "functions", "mpi_ops", "optimizer", "sync_batch_norm",
]
# fmt: on
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def python(code, **env):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_paceline_imports_no_framework_and_loads_no_library():
    python("""
        import sys, paceline
        assert not {"torch", "numpy", "tensorflow", "jax", "mxnet"} & set(sys.modules)
        assert "libpaceline" not in open("/proc/self/maps").read()
    """)


def test_versions_agree():
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", paceline.__version__)
    assert abi.library().pl_version().decode() == paceline.__version__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = paceline.nonsense


def imported(script):
    """The packages that a script imports."""
    nodes = list(ast.walk(ast.parse(script.read_text())))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {module.split(".")[0] for module in modules}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_extras_install_what_an_example_imports(example):
    extras = {re.split(r"[^\w-]", r)[0] for r in metadata.requires("paceline") or [] if "extra ==" in r}
    distributions = metadata.packages_distributions()
    others = imported(example) - sys.stdlib_module_names - {"paceline"} - {e.stem for e in EXAMPLES}
    assert [name for name in others if not extras & {name, *distributions.get(name, [])}] == []


@pytest.mark.parametrize(
    "path, why",
    [
        ("/nowhere/libpaceline.so", "cannot be loaded from /nowhere/libpaceline.so"),
        ("libc.so.6", "libc.so.6 speaks version none of Paceline's C interface"),
    ],
)
def test_a_library_that_is_missing_or_not_of_this_release_is_an_error_that_names_its_path(path, why):
    out = python(
        """
        import paceline.torch as hvd
        try:
            hvd.init()
        except ImportError as e:
            print(e)
    """,
        PACELINE_LIBRARY=path,
    )
    assert why in out


def test_the_structures_are_those_of_the_header():
    header = (Path(__file__).parents[2] / "cgo" / "paceline.h").read_text()
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    names = re.findall(r"typedef struct (\w+) {", code)
    assert {"pl_op", "pl_output"} < set(names)
    for name in names:
        body = re.search(rf"typedef struct {name} {{(.*?)}} {name};", code, re.S)
        fields = re.findall(r"(\w+);", body.group(1))
        structure = getattr(abi, name.removeprefix("pl_").title())
        assert fields == [field for field, _ in structure._fields_]
    assert f"#define PL_ABI_VERSION {abi.VERSION}\n" in header
    for function in re.findall(r"\b(pl_\w+)\(", code):
        assert function in abi._PROTOTYPES, function


def test_objects_of_any_length_are_few_tensors():
    """Each length that is broadcast is declared, and stays so until the job ends."""
    sent = {length: objects._rounded(length) for length in range(1, 1 << 18)}
    assert all(length <= n <= length + max(length // 8, 63) for length, n in sent.items())
    assert len(set(sent.values())) < 120


def test_properties_of_codecs_and_models_come_from_the_library():
    (dgc,) = engine.codec_info("dgc:0.01,momentum=0.5+s2")
    assert (dgc["momentum"], dgc["residual"], dgc["unbiased"], dgc["precise"]) == (0.5, 8, False, False)
    rules = engine.codec_info('[{"names": "*.bias", "codec": "none"}, {"codec": "int8:block=64"}]')
    assert [(r["setting"], r["unbiased"]) for r in rules] == [("none", True), ("int8:block=64", True)]
    assert engine.sync_info("ssp:3")["held"] and not engine.sync_info("bsp")["held"]
    for ask in (engine.codec_info, engine.sync_info):
        with pytest.raises(ValueError, match="unknown"):
            ask("nonsense")


def test_every_name_of_horovod_is_there():
    import paceline.torch as hvd

    assert [name for name in NAMES if not hasattr(hvd, name)] == []
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)
    assert set(hvd.elastic.__all__) >= {"run", "run_fn", "TorchState", "ElasticSampler", "ObjectState", "StateHandler"}


@pytest.fixture
def as_horovod(monkeypatch):
    """The interpreters that the test starts import Paceline as horovod."""
    shim = str(Path(paceline.__file__).parent / "_horovod")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([shim, *filter(None, [os.environ.get("PYTHONPATH")])]))


def test_imports_of_horovod_resolve_to_the_same_modules(as_horovod):
    python("""
        import horovod
        import horovod.torch as hvd
        import horovod.torch.mpi_ops
        from horovod.torch.mpi_ops import allreduce_async_, gpu_available, num_rank_is_power_2, synchronize
        from horovod.torch.compression import Compression
        from horovod.torch.functions import broadcast_object
        from horovod.torch.optimizer import DistributedOptimizer
        from horovod.torch.sync_batch_norm import SyncBatchNorm
        from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt, HorovodVersionMismatchError
        from horovod.common.elastic import ObjectState, State, run_fn
        from horovod.common.process_sets import ProcessSet
        from horovod.torch.elastic import ElasticSampler, TorchState, run as elastic_run
        from horovod.torch.elastic.sampler import ElasticSampler as same_sampler
        from horovod.torch.elastic.state import TorchState as same_state
        from horovod.common.util import check_extension, env, gpu_available, split_list
        from horovod.runner import run
        import paceline.torch
        import paceline.torch.mpi_ops
        assert hvd is paceline.torch and horovod.torch is hvd and hvd.__name__ == "paceline.torch"
        assert horovod.torch.mpi_ops is paceline.torch.mpi_ops is hvd.mpi_ops
        assert hvd.__spec__.name == "paceline.torch"
        assert HorovodInternalError is hvd.HorovodInternalError and ProcessSet is hvd.ProcessSet
        assert hvd.elastic.run is elastic_run and same_state is TorchState is hvd.elastic.TorchState
        assert issubclass(TorchState, State) and same_sampler is ElasticSampler
        assert issubclass(HostsUpdatedInterrupt, RuntimeError) and horovod.run is run
        assert tuple(map(int, horovod.__version__.split("."))) >= (0, 20)
        check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", hvd.__file__, "mpi_lib_v2")
        assert hvd.check_extension is check_extension and callable(hvd.mpi_ops.is_homogeneous)
    """)


ABSENT = {
    "horovod.runner.elastic.driver": "--min-np",
    "horovod.runner.launch": "paceline run",
    "horovod.tensorflow": "pip install 'paceline[tensorflow]'",
    "horovod.tensorflow.keras": "pip install 'paceline[tensorflow]'",
    "horovod.keras": "pip install 'paceline[tensorflow]'",
    "horovod.mxnet": "pip install 'paceline[mxnet]'",
    "horovod.run": "from horovod.runner import run",
    "horovod.torch.mpi_lib_v2": "horovod.torch.mpi_ops",
    "horovod.spark": "paceline run",
    "horovod.ray": "paceline run",
    "horovod.nonsense": "No module named 'horovod.nonsense'",
}


def test_what_paceline_lacks_is_an_error_that_says_what_to_use(as_horovod):
    said = python(f"""
        import importlib, sys
        import horovod.torch as hvd
        sys.modules["tensorflow"] = sys.modules["mxnet"] = None
        for name in {list(ABSENT)}:
            try:
                importlib.import_module(name)
                raise SystemExit(f"{{name}} was imported")
            except ImportError as e:
                print(e)
    """).splitlines()
    for text, (name, hint) in zip(said, ABSENT.items(), strict=True):
        assert "Paceline" in text or "paceline" in text, text
        assert name.split(".")[1 if name.startswith("horovod.") else 0] in text and hint in text, text


NAMES_THAT_ARE_ABSENT = {
    "from horovod import spark": "paceline run",
    "from horovod import ray": "paceline run",
    "from horovod.torch import mpi_lib_v2": "horovod.torch.mpi_ops",
    "from horovod.runner import elastic": "--min-np",
    "from horovod.runner import run_commandline": "paceline run",
    "from horovod.common.basics import HorovodBasics": "horovod.torch",
    "from horovod.common.elastic import notification_manager": "by itself",
}


def test_names_that_paceline_lacks_are_errors_that_say_what_to_use(as_horovod):
    said = python(f"""
        for statement in {list(NAMES_THAT_ARE_ABSENT)}:
            try:
                exec(statement)
                raise SystemExit(f"no error: {{statement}}")
            except ImportError as e:
                print(e)
        from horovod import runner, torch, common
        assert runner.run and torch.mpi_ops and not hasattr(torch, "nonsense") and not hasattr(runner, "nonsense")
        try:
            from horovod import nonsense
        except ImportError as e:
            assert "nonsense" in str(e)
    """).splitlines()
    for text, (statement, hint) in zip(said, NAMES_THAT_ARE_ABSENT.items(), strict=True):
        assert "stands in for Horovod" in text and statement.split()[-1] in text and hint in text, text


def test_data_loaders_of_horovod_load_ahead_in_a_thread(as_horovod):
    python("""
        import threading
        from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
        import horovod.data
        assert horovod.data.BaseDataLoader is BaseDataLoader

        class Numbers(BaseDataLoader):
            def __init__(self, n):
                self.n, self.loaded, self.full = n, 0, threading.Event()
            def __len__(self):
                return self.n
            def _iterate(self):
                for i in range(self.n):
                    if i == 13:
                        raise OSError("unreadable")
                    self.loaded += 1
                    if self.loaded == 4:
                        self.full.set()
                    yield i
            def _process_batch(self, batch):
                return batch, threading.current_thread() is threading.main_thread()

        class Ahead(AsyncDataLoaderMixin, Numbers):
            pass

        for size in (0, 1, 3):
            loader = Ahead(size, False, 10)
            for epoch in range(2):
                assert list(loader) == list(Numbers(10)) == [(i, True) for i in range(10)]
        assert len(loader) == 10

        loader = Ahead(async_loader_queue_size=3, debug_data_loader=False, n=10)
        batches = iter(loader)
        assert next(batches) == (0, True)
        assert loader.full.wait(600), "it does not load ahead"
        assert list(loader)[0] == (0, True), "a new epoch begins anew"
        next(iter(loader))
        loader.close_async_loader()

        class Slow(Ahead):
            def _iterate(self):
                yield from range(2)
                self.waits.set()
                self.ends.wait(600)
        slow, rest = Slow(3, n=10), []
        slow.waits, slow.ends = threading.Event(), threading.Event()
        consumer = threading.Thread(target=lambda: rest.extend(slow), daemon=True)
        consumer.start()
        assert slow.waits.wait(600)
        threading.Timer(0.1, slow.ends.set).start()
        slow.close_async_loader()
        consumer.join(60)
        assert not consumer.is_alive() and len(rest) == 2, "a consumer in another thread waits for ever"
        for broken in (Ahead(0, n=20), Ahead(3, n=20)):
            try:
                list(broken)
                raise SystemExit("the error of the loader was lost")
            except OSError as e:
                assert "unreadable" in str(e)
        for call in (lambda: Ahead(-1, n=10), lambda: len(BaseDataLoader()), lambda: list(BaseDataLoader())):
            try:
                call()
                raise SystemExit("no error")
            except (ValueError, NotImplementedError) as e:
                assert "async_loader_queue_size" in str(e) or "define it" in str(e)
        assert [t.name for t in threading.enumerate() if t.name == "data loader"] == []
    """)


def test_without_pytorch_the_error_says_what_to_install(as_horovod):
    """An interpreter in which `import torch` fails, as where it is not installed."""
    said = python("""
        import importlib, sys
        sys.modules["torch"] = None
        import paceline, horovod
        for name in ("paceline.torch", "horovod.torch", "paceline.torch.mpi_ops"):
            try:
                importlib.import_module(name)
            except ImportError as e:
                print(e)
    """)
    assert said.splitlines() == ["PyTorch is not installed; pip install 'paceline[torch]'"] * 3


def test_an_old_pytorch_is_an_import_error_that_names_it():
    code = "import torch; torch.__version__ = '2.0.1'; del torch.Tensor.register_post_accumulate_grad_hook"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import paceline.torch"], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 1 and "PyTorch 2.0.1 is too old for paceline.torch, which needs 2.1" in done.stderr


def test_helpers_of_horovod():
    from paceline.common import util

    assert util.split_list(list("abcde"), 3) == [["a", "b"], ["c", "d"], ["e"]]
    assert util.is_iterable("ab") and not util.is_iterable(1)
    assert [n for n in range(10) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert util.is_version_greater_equal_than("2.10.1+cpu", "2.9.0")
    assert not util.is_version_greater_equal_than("1.13.1", "2.0.0")
    with pytest.raises(ValueError, match="like 1"):
        util.is_version_greater_equal_than("1.0.0", "2.0")
    with util.env(PACELINE_TEST_A="1", PACELINE_TEST_B=None):
        assert os.environ["PACELINE_TEST_A"] == "1" and "PACELINE_TEST_B" not in os.environ
    assert "PACELINE_TEST_A" not in os.environ
    assert util.extension_available("torch") and not util.extension_available("tensorflow")
    for framework in ("mxnet", "nonsense"):  # there is no MXNet in this environment
        with pytest.raises(ImportError, match=rf"horovod\.{framework}"):
            util.check_extension(f"horovod.{framework}", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")
        assert not util.gpu_available(framework)
    assert (util.nccl_built(), util.mpi_built(verbose=True), util.gloo_built()) == (0, False, True)
    assert util.get_average_backwards_compatibility_fun(None)(None, None) == 0
