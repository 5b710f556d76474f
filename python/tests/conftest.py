"""Tests run the commands `paceline` and `python` of the interpreter that runs the tests.

Ctrl-C ends them as at a terminal, even if the tests run in the background of a shell, whose background processes
ignore it.
"""

import os
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
