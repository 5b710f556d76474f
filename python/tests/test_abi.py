"""The C interface from C: programs that are compiled against the header and linked to the library, in real jobs."""

import json
import os
import secrets
import shlex
import subprocess
from pathlib import Path

import pytest
from jobs import HANG_S

from paceline.common import abi

HERE = Path(__file__).parent
# See python/backend/compilers.py: PyPI's compiler if the machine has none.
CC = shlex.split(os.environ.get("CC", "cc"))


@pytest.fixture
def compiled(tmp_path):
    """Compiles a program of c/."""

    def compile(name):
        program, library = tmp_path / name, abi.library_path().resolve()
        include = ["-I", HERE / "c", "-I", HERE.parents[1] / "cgo"]
        link = [library, f"-Wl,-rpath,{library.parent}", "-lpthread"]
        source = HERE / "c" / f"{name}.c"
        subprocess.run([*CC, "-std=gnu11", "-Wall", "-Werror", *include, source, "-o", program, *link], check=True)
        return program

    return compile


def run(program, port, *, size=2, **settings):
    """Runs the program as the ranks of a job. Its arguments are those of pl_init, and the rank."""
    env = {"PACELINE_SIZE": str(size), "PACELINE_PORT": str(port), "PACELINE_JOB_SECRET": secrets.token_hex(16)}
    ranks = []
    for rank in range(size):
        own = {"PACELINE_RANK": str(rank), "PACELINE_LOCAL_RANK": str(rank), "PACELINE_LOCAL_SIZE": str(size)}
        text = json.dumps({"env": env | own, "settings": settings})
        ranks.append(subprocess.Popen([program, text, str(rank)], stderr=subprocess.PIPE, text=True))
    try:
        errors = [rank.communicate(timeout=HANG_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    # Rank 0 has the scheduler and may end first, of which the others warn.
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(errors)


def test_a_caller_that_was_compiled_with_an_older_header(compiled, port):
    run(compiled("older"), port)


def test_threads_submit_wait_and_release_side_by_side(compiled, port):
    run(compiled("threads"), port)


@pytest.mark.parametrize("settings", [{}, {"partition_bytes": "64KiB", "sum_in_rank_order": True}])
def test_the_end_of_each_operation_is_one_call(compiled, port, settings):
    run(compiled("done"), port, **settings)


def test_requests_at_the_doorbell_are_answered_whoever_closes_it(compiled):
    run = subprocess.run([compiled("bell")], capture_output=True, text=True, timeout=HANG_S)
    assert run.stdout == "all were answered\n", run.stdout + run.stderr


def test_who_waits_for_many_is_woken_however_late_another_begins_to_wait(compiled):
    run = subprocess.run([compiled("wakeups")], capture_output=True, text=True, timeout=HANG_S)
    assert run.stdout == "all woke up\n", run.stdout + run.stderr


def test_no_operation_that_is_left_is_forgotten(compiled):
    run = subprocess.run([compiled("left")], capture_output=True, text=True, timeout=HANG_S)
    assert run.stdout == "none was forgotten\n", run.stdout + run.stderr


def test_a_large_operation_that_is_left_rings(compiled):
    run = subprocess.run([compiled("large")], capture_output=True, text=True, timeout=HANG_S)
    assert run.stdout == "large ones ring\n", run.stdout + run.stderr


def test_operations_that_are_submitted_later(compiled, port):
    run(compiled("later"), port)
