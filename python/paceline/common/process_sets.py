"""Process sets: subsets of the ranks that run collective operations among themselves."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from paceline.common.engine import engine


class ProcessSet:
    """A set of ranks. Give it to `init(process_sets=[...])` or to `add_process_set`, then to operations.

    process_set_id: the number of the registered set. None before it is registered, after it is removed, and after the
        next `init()`, when the number may be another set's.
    ranks: sorted global ranks.
    """

    _registered: tuple[int | None, int] = (None, 0)  # the number, and the engine's round in which it is valid
    ranks: list[int] | None = None
    mpi_comm = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        try:
            self.ranks = sorted(operator.index(rank) for rank in ranks_or_comm)
        except TypeError:
            raise ValueError(
                f"a ProcessSet is made from a list of ranks, not from {ranks_or_comm!r} "
                "(Paceline has no MPI communicators)"
            ) from None

    @property
    def process_set_id(self) -> int | None:
        """The set's number in this round of the job."""
        number, in_round = self._registered
        return number if in_round == engine.round else None

    @process_set_id.setter
    def process_set_id(self, number: int | None) -> None:
        self._registered = number, engine.round

    def size(self) -> int | None:
        """The number of ranks in the set, None if it is not registered."""
        return None if self.process_set_id is None else len(_ranks_of(self))

    def rank(self) -> int | None:
        """This process's rank in the set, None if the set is not registered. Raises ValueError outside of the set.

        Roots of broadcasts are global ranks nevertheless, as in Horovod.
        """
        if self.process_set_id is None:
            return None
        rank, _ = place_in(self)
        if rank < 0:
            raise ValueError(f"this process is not in {self}: its rank is {engine.rank()}")
        return rank

    def included(self) -> bool | None:
        """Whether this process is in the set. Raises ValueError before `init()`."""
        return None if self.ranks is None else engine.rank() in _ranks_of(self)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"

    __repr__ = __str__


class _GlobalProcessSet(ProcessSet):
    """All ranks of the current job."""

    process_set_id = 0

    def __init__(self) -> None:
        pass

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        return list(range(engine.size())) if engine.is_initialized() else []


global_process_set = _GlobalProcessSet()


def _ranks_of(process_set: ProcessSet) -> list[int]:
    if process_set.process_set_id == 0:
        return list(range(engine.size()))
    return process_set.ranks or []


def check_process_set(given: object) -> None:
    """Raises ValueError unless it is a ProcessSet."""
    if not isinstance(given, ProcessSet):
        raise ValueError(
            f"process_set={given!r}: give a ProcessSet, such as hvd.add_process_set([0, 1]) returns, "
            f"not {type(given).__name__}"
        )


def process_set_number(process_set: ProcessSet) -> int:
    """The number of the process set of an operation, which needs the other ranks from here on.

    Raises ValueError if it is no ProcessSet, or not registered.
    """
    engine.arrive()
    number = getattr(process_set, "process_set_id", None)
    if number is None:
        check_process_set(process_set)
        raise ValueError(
            f"{process_set} is not registered: give it to hvd.init(process_sets=[...]) or to hvd.add_process_set()"
        )
    return number


def place_in(process_set: ProcessSet) -> tuple[int, int]:
    """This process's rank in a registered set, -1 if it is not a member, and the set's size."""
    check_process_set(process_set)
    ranks = _ranks_of(process_set)
    return ranks.index(engine.rank()) if engine.rank() in ranks else -1, len(ranks)


def register_process_sets(process_sets: Iterable[ProcessSet]) -> None:
    """Sets the numbers of the sets that `init` has registered.

    Raises ValueError for a duplicate, and for a set that a running job does not have.
    """
    numbers = {tuple(ranks): number for number, ranks in engine.process_sets().items()}
    seen = {0}
    for place, process_set in enumerate(process_sets):
        number = numbers.get(tuple(process_set.ranks or []))
        if number is None:
            raise ValueError(
                f"process_sets[{place}] comes too late: hvd.init() has been called without {process_set}; "
                "use hvd.add_process_set()"
            )
        if number in seen:
            process_set.process_set_id = None
            raise ValueError(f"process_sets[{place}] is a duplicate: {process_set}")
        seen.add(number)
        process_set.process_set_id = number


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers a set while the job runs; every rank calls it with the same ranks. Returns the set.

    Raises ValueError if a set with these ranks exists. Unlike Horovod's, it needs no setting beforehand.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.ranks in engine.process_sets().values():
        raise ValueError(f"a process set with these ranks exists already: {process_set}")
    process_set.process_set_id = engine.add_process_set(process_set.ranks or [])
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set; every rank calls it. Returns False for the global set and for one that is not registered.

    Raises ValueError before `init()` and for what is no ProcessSet, HorovodInternalError if a rank does not come in
    time or is lost.
    """
    check_process_set(process_set)
    number = process_set.process_set_id
    if not number:
        return False
    engine.remove_process_set(number)
    process_set.process_set_id = None
    return True
