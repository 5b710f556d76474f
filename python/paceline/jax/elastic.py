"""Elastic training for JAX: `@hvd.elastic.run`, and a state of pytrees, as Horovod has them for other frameworks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from paceline.common.basics import rank, rejoin
from paceline.common.elastic import ObjectState, State, run_fn
from paceline.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from paceline.jax._collective import drain
from paceline.jax.functions import broadcast_object

__all__ = ["JaxState", "ObjectState", "State", "run", "run_fn"]

_Result = TypeVar("_Result")


class JaxState(ObjectState):
    """A state of pytrees and other objects: each keyword argument is an attribute, such as params, opt_state and step.

    JAX's arrays do not change, so that a training assigns the attributes: `state.params = new_params`. They keep their
    values, types and places. What cloudpickle cannot send is no part of a state.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(broadcast_object, rank, **kwargs)

    def save(self) -> None:
        """Saves copies of the attributes, when they are computed: a loss meanwhile leaves what was saved before."""
        self._wait()
        super().save()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt, on every rank, if ranks wait to join or have to go. Every rank calls it."""
        self._wait()  # the attributes would lack what is in flight when this rank leaves the job
        super().check_host_updates()

    def _wait(self) -> None:
        jax.block_until_ready([getattr(self, name) for name in self._saved_state])


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorates a training function, whose first argument is a state, so that it goes on after a change of its ranks.

    The function is called again after each change, with the state that was committed last (a rank is lost) or as it is
    (ranks join or leave); see `paceline.common.elastic.run_fn`. Start the job by `paceline run --min-np`. A loss that a
    jitted function reports, as jax.errors.JaxRuntimeError, counts as well. Jitted functions are compiled anew after a
    change, as their programs may have the ranks in them.
    """

    @functools.wraps(func)
    def translated(*args: Any, **kwargs: Any) -> _Result:
        try:
            result = func(*args, **kwargs)
            if failure := drain():  # of a program that the function has left in flight
                raise failure
            return result
        except RuntimeError as e:  # JaxRuntimeError, which JAX 0.4 has by another name
            ours = isinstance(e, HorovodInternalError | HostsUpdatedInterrupt)
            if ours or HorovodInternalError.__name__ not in str(e):
                raise
            raise HorovodInternalError(str(e)) from e

    return run_fn(translated, rejoin)
