"""Horovod's elastic training, for every framework: the state of a training that survives a change of its ranks."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from paceline._absent import explain_absent_names
from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from paceline.common.objects import greatest
from paceline.common.seat import seat

_Result = TypeVar("_Result")
_log = logging.getLogger("paceline.elastic")


class State:
    """What ranks have to have in common: base of the frameworks' states.

    bcast_object: returns rank 0's object on every rank. get_rank: returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Has functions be called after each change of the ranks, when `size()` and `rank()` are new."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after each change of the ranks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Horovod's, without effect: the process hears of changed hosts by itself."""

    def commit(self) -> None:
        """Saves the state in memory, to go back to it after a loss, then `check_host_updates()`.

        The copy costs time: commit every few batches, as often as what is lost otherwise is worth it.
        """
        self.save()
        seat.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt, on every rank, if ranks wait to join or have to go. Every rank calls it."""
        if not seat.elastic:
            return
        number, removed = seat.news()
        # A broadcast would fail where its root is lost.
        number, others = divmod(greatest(2 * number + (not removed), "paceline.hosts"), 2)
        if number:
            raise HostsUpdatedInterrupt(skip_sync=not others)

    def save(self) -> None:
        """Saves the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives every rank the state of rank 0, which is one that has trained before."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts the state to other ranks, before the callbacks."""


class ObjectState(State):
    """A state of Python objects: each keyword argument is an attribute."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = dict(kwargs)
        self._set_attributes()

    def save(self) -> None:
        """Saves copies of the attributes."""
        self._saved_state = {name: _copy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Sets the attributes to copies of what was saved."""
        self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, _copy(value))

    def sync(self) -> None:
        """Sets the attributes to rank 0's, and saves them."""
        if self._saved_state:
            self._saved_state = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
            self._set_attributes()


def _copy(value: Any) -> Any:
    """A copy. Of what has none by itself, such as a tensor of a graph, the one that other ranks would get."""
    try:
        return copy.deepcopy(value)
    except (RuntimeError, TypeError):
        return cloudpickle.loads(cloudpickle.dumps(value))


def run_fn(func: Callable[..., _Result], reset: Callable[[], None]) -> Callable[..., _Result]:
    """`func(state, ...)` as a training that goes on after a change of its ranks.

    Before func is called, and after each change, the state is synchronised. HorovodInternalError, by which the loss
    of a rank is known, restores what was committed last; HostsUpdatedInterrupt keeps the state as it is. reset: leaves
    the job and joins it again, with the settings that init was given. Without a launcher that gives this process a
    place in another round, HorovodInternalError goes to the caller, so that torchrun, for example, starts the ranks
    again.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> _Result:
        engine.arrive()
        seat.watch()
        skip_sync, changed = False, seat.has_moved()
        while True:
            try:
                if changed:
                    state.on_reset()
                if not skip_sync:
                    state.sync()
                seat.synchronised()
                return func(state, *args, **kwargs)
            except HorovodInternalError as e:
                if not seat.elastic:
                    raise
                nothing = "" if seat.commits else ", which is nothing; call state.commit() every few batches"
                _log.warning("going back to what was committed last%s: %s", nothing, e)
                with suppress(HorovodInternalError):  # for the same loss
                    engine.rest()
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as e:
                seat.commits += 1  # the state may be newer than the last commit
                skip_sync = e.skip_sync
            seat.may_skip = skip_sync
            reset()
            skip_sync = skip_sync and (seat.skip or not seat.elastic)
            changed = True

    return wrapper


explain_absent_names(__name__)
