"""Broadcasts of parameters, and objects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from paceline.common import objects
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.jax._collective import settle
from paceline.jax._ops import broadcast

Tree = TypeVar("Tree")
Given = ParamSpec("Given")
Result = TypeVar("Result")


def broadcast_parameters(params: Tree, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Tree:
    """Returns root_rank's values of a pytree, such as a model's parameters or an optimizer's state.

    JAX's arrays do not change, so that the result takes the argument's place: `params = broadcast_parameters(params)`.
    Shapes and types are the same on all ranks. An empty tree is returned as it is.

    Raises what `broadcast` raises.
    """
    import jax

    leaves = jax.tree_util.tree_leaves(params)
    return broadcast(params, root_rank, "broadcast", process_set) if leaves else params


def _after_programs(exchange: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, which begins when the programs that were started before have ended."""

    @functools.wraps(exchange)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        settle()
        return exchange(*args, **kwargs)

    return call


broadcast_object = _after_programs(objects.broadcast_object)
allgather_object = _after_programs(objects.allgather_object)
