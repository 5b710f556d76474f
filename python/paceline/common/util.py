"""Horovod's helpers that scripts import: `from horovod.common.util import split_list`."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import util
from typing import Any, TypeVar

from paceline.common import operators
from paceline.common.basics import ccl_built as ccl_built
from paceline.common.basics import ddl_built as ddl_built
from paceline.common.basics import gloo_built as gloo_built
from paceline.common.basics import mpi_built as mpi_built
from paceline.common.basics import nccl_built as nccl_built

_T = TypeVar("_T")


def split_list(l: list[_T], n: int) -> list[list[_T]]:  # noqa: E741, Horovod's argument
    """The list in n parts; where their lengths differ, the first ones have one element more."""
    share, over = divmod(len(l), n)
    starts = [i * share + min(i, over) for i in range(n + 1)]
    return [l[a:b] for a, b in itertools.pairwise(starts)]


def is_iterable(x: Any) -> bool:
    """Whether a loop can go through x."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether the number of ranks is a power of two, which Horovod's Adasum needs and Paceline's does not."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version is a target, major.minor.patch, or a later one. Raises ValueError for other texts."""
    if not isinstance(ver, str) or not isinstance(target, str) or target.count(".") != 2:
        raise ValueError(f"versions must be texts like 1.2.3, got {ver!r} and {target!r}")
    release = [[int(n) for n in re.findall(r"\d+", text.partition("+")[0])[:3]] for text in (ver, target)]
    return release[0] >= release[1]


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """A context with environment variables; those that are None are left as they are."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework's module, such as "torch", can be imported here."""
    known = ext_base_name in ("torch", "tensorflow", "mxnet") and util.find_spec(ext_base_name) is not None
    if verbose:
        print(f"paceline.{ext_base_name} {'can' if known else 'cannot'} be imported")
    return known


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: str) -> None:
    """Raises ImportError for a framework without a module here, such as "horovod.tensorflow"."""
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"{ext_name} is not part of Paceline, or its framework is not installed")


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Does nothing: Paceline is not built against a version of a framework."""


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework sees a GPU."""
    if not extension_available(ext_base_name):
        return False
    if ext_base_name == "tensorflow":
        import tensorflow as tf

        return bool(tf.config.list_physical_devices("GPU"))
    if ext_base_name == "mxnet":
        import mxnet as mx

        return mx.context.num_gpus() > 0
    import torch

    return torch.cuda.is_available()


def get_average_backwards_compatibility_fun(reduce_ops: Any = operators) -> Callable[[int | None, bool | None], int]:
    """A function of (op, average) that gives the operator, which is Average without either."""
    return operators.operator_of
