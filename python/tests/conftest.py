"""Tests run the commands `paceline` and `python` of the interpreter that runs the tests.

Ctrl-C ends them as at a terminal, even if the tests run in the background of a shell, whose background processes
ignore it.
"""

import fcntl
import os
import shutil
import signal
import sys

import pytest
from jobs import reserved_port

os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def port():
    """A port that nobody else gets during the test."""
    with reserved_port() as number:
        yield number


@pytest.fixture(scope="session")
def device(tmp_path_factory):
    """A device beside the CPU, and what processes that use it have in their environment: a GPU, or the tests' own."""
    import offhost  # not where other frameworks are tested
    import torch

    if torch.__version__ < "2.7":
        pytest.skip("PyTorch before 2.7 has no streams that are the same for all devices")
    if torch.cuda.is_available():
        return "cuda", {}
    if shutil.which("c++") is None:
        pytest.skip("neither a GPU here nor a C++ compiler, for the tests' own device")
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    library = folder / "offhost.so"
    with open(folder / "offhost.lock", "w") as lock:  # xdist's workers share it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            offhost.build(folder)
    return "offhost", {"OFFHOST": str(library), "PYTHONPATH": os.path.dirname(__file__)}
