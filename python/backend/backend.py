"""The build backend: scikit-build-core, which drives CMake, which runs `go build`.

In addition, if the machine lacks Go or a C compiler, the PyPI package that has it becomes a build
requirement, so that `pip install .` needs only Python. `pip install -e .` is refused: the package looks for its
libraries beside its modules, which would stay in the checkout.
"""

import os
import sys

import compilers
from scikit_build_core import build as skbuild

get_requires_for_build_sdist = skbuild.get_requires_for_build_sdist
build_sdist = skbuild.build_sdist
prepare_metadata_for_build_wheel = skbuild.prepare_metadata_for_build_wheel


def get_requires_for_build_wheel(config_settings=None):
    return skbuild.get_requires_for_build_wheel(config_settings) + _packages()


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _choose_c_compiler()
    return skbuild.build_wheel(wheel_directory, config_settings, metadata_directory)


def _packages():
    return [package for package, _ in compilers.missing()]


def _choose_c_compiler():
    if "CC" not in os.environ and not compilers.has_c_compiler():
        os.environ["CC"] = f"{sys.executable} -m ziglang cc"
