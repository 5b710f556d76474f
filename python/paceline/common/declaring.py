"""The names under which parameters are declared as values that the servers hold."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator

from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError
from paceline.common.process_sets import ProcessSet, process_set_number

# How often a name was declared, by (generation of the engine, process set, name). Ranks declare in the same order.
_declared: collections.Counter[tuple[int, int, str]] = collections.Counter()


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
