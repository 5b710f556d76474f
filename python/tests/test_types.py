"""The package's types: of all that its modules offer, for a user's script under `mypy --strict`, and its own."""

import ast
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from docstrings import check_docstrings

import paceline
import paceline.torch as hvd

SCRIPT = Path(__file__).parent / "typed" / "script.py"
CHECKOUT = Path(__file__).parents[2]


def mypy(*arguments, cwd, cache):
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", cache, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("mypy")


def test_a_users_script_with_every_public_name_passes_strictly(cache, tmp_path):
    """The installed package has py.typed and annotations, for scripts anywhere."""
    assert (resources.files("paceline") / "py.typed").is_file()
    code, said = mypy("--strict", SCRIPT, cwd=tmp_path, cache=cache)
    assert code == 0, said


def test_the_script_has_every_public_name():
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    missing = [("hvd", n) for n in hvd.__all__ if ("hvd", n) not in used]
    missing += [("paceline", n) for n in paceline.__all__ if ("paceline", n) not in used]
    missing += [("c", n) for n in dir(hvd.Compression) if not n.startswith("_") and not {("c", n), ("hvd", n)} & used]
    assert [m for m in missing if m != ("c", "fp16")] == []


def test_a_mistake_in_a_users_script_is_found(cache, tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(
        "import torch\n"
        "import paceline.torch as hvd\n"
        "hvd.allreduce(torch.ones(3), name=7)\n"
        "hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(3)]), synch='ssp:3')\n"
    )
    code, said = mypy("--strict", script, cwd=tmp_path, cache=cache)
    assert code == 1 and 'incompatible type "int"' in said and '"synch"' in said, said


def test_the_package_passes_by_its_own_settings(cache):
    code, said = mypy(cwd=CHECKOUT, cache=cache)
    assert code == 0, said


def test_every_name_says_what_it_takes_and_what_goes_wrong():
    check_docstrings(hvd, operations=23)
