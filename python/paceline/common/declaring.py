"""The names under which optimizers declare values that the servers hold, and exchange gradients."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Collection, Iterator

from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError
from paceline.common.process_sets import ProcessSet, process_set_number
from paceline.common.seat import seat

# How often a name was declared, by (generation of the engine, process set, name). Ranks declare in the same order.
_declared: collections.Counter[tuple[int, int, str]] = collections.Counter()

# How often a prefix was asked for, by (process set, name), in all lives of the engine.
_reduced: collections.Counter[tuple[int, str]] = collections.Counter()


def own_prefix(process_set: ProcessSet, parameters: Collection[str]) -> str:
    """A prefix for the names of an optimizer's gradients whose codec keeps what it dropped, by name, for the next one.

    Another optimizer may have the names of parameters, as two models of one class do: it has another prefix. The first
    one has none. Every rank of the set calls it for each optimizer, from the beginning. In an elastic job none has one,
    because a rank that joins has made others than those that were there.
    """
    if seat.elastic:
        return ""
    keys = [(process_set_number(process_set), name) for name in parameters]
    place = 1 + max((_reduced[key] for key in keys), default=0)
    for key in keys:
        _reduced[key] = place
    return "" if place == 1 else f"#{place}."


def count_anew() -> None:
    """Has the next optimizers have the names of gradients that the first ones had: what has been loaded is for them."""
    _reduced.clear()


@contextlib.contextmanager
def declaring(process_set: ProcessSet) -> Iterator[Callable[[str], str]]:
    """Declares parameters in its block, which calls what it gets for the name of each one's value.

    A parameter of another optimizer may have the name: the value's is then another one. A declaration that fails, such
    as for the loss of its root, gives the names back, and the next step declares the parameters again.
    """
    number, taken = process_set_number(process_set), []
    for old in [key for key in list(_declared) if key[0] != engine.generation]:
        _declared.pop(old, None)

    def name_of(parameter: str) -> str:
        name = f"value.{parameter}"
        taken.append((engine.generation, number, name))
        _declared[taken[-1]] += 1
        place = _declared[taken[-1]]
        return name if place == 1 else f"{name}.{place}"

    try:
        yield name_of
    except HorovodInternalError:
        _declared.subtract(taken)
        raise
