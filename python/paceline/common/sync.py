"""Synchronisation models: how far ranks may be apart, for `DistributedOptimizer(sync=...)` and `declare(sync=...)`.

Each is a pair of FluentPS's conditions (Table III), and counts progress from 0 as FluentPS does: SSP(0) is BSP. All
have `parking`: a pull that the model delays waits until its own iteration closes ("lazy"), or until the next one does
("soft-barrier").
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.common.engine import engine

# fmt: off
__all__ = [
    "Model", "BSP", "ASP", "SSP", "DSPS", "PSSP", "DynamicPSSP", "DropStragglers", "Adaptive", "ElasticBSP",
    "Expression", "PARKING", "check", "model_of", "set_pull_condition", "set_push_condition",
]
# fmt: on

PARKING = ("lazy", "soft-barrier")


@dataclasses.dataclass(frozen=True)
class Model:
    """A synchronisation model. `setting` is its text, as in PACELINE_SYNC."""

    parking: str = dataclasses.field(default="lazy", kw_only=True)

    cached = False  # exchange parameters in every iteration
    _name = ""  # stands before the arguments, which are the other fields

    def __post_init__(self) -> None:
        if self.parking not in PARKING:
            raise ValueError(f"parking={self.parking!r}: allowed are {' and '.join(PARKING)}")

    @property
    def setting(self) -> str:
        """The model's text, such as "ssp:3"."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("parking", "cached")]
        arguments = ",".join(str(getattr(self, name)) for name in names)
        return f"{self._name}:{arguments}" if arguments else self._name

    @property
    def declared(self) -> str | None:
        """The setting for operations: None for BSP, their default."""
        return None if self.setting == BSP._name else self.setting

    @property
    def ahead(self) -> bool:
        """Whether ranks may run ahead, so that the servers hold the parameters."""
        return engine.sync_info(self.setting)["held"]

    @property
    def whole(self) -> bool:
        """Whether every sum has the pushes of all ranks that take part."""
        return engine.sync_info(self.setting)["whole"]

    @property
    def has_supersteps(self) -> bool:
        """Whether ranks run freely between barriers."""
        return engine.sync_info(self.setting)["supersteps"]

    @property
    def asks_significance(self) -> bool:
        """Whether the model uses |gradient| / |weights| of each push."""
        return engine.sync_info(self.setting)["significance"]

    @property
    def alone(self) -> int:
        """The iterations that a rank makes between two exchanges with the servers."""
        return 0

    @property
    def exchanged(self) -> str | None:
        """The setting by which servers delay an optimizer's exchanges, each of `alone` + 1 iterations."""
        return self.declared

    @property
    def soft_park(self) -> bool:
        """Whether delayed pulls wait in the soft-barrier order."""
        return self.parking == "soft-barrier"


@dataclasses.dataclass(frozen=True)
class BSP(Model):
    """Bulk synchronous: all ranks wait for each other in every iteration."""

    _name = "bsp"


@dataclasses.dataclass(frozen=True)
class ASP(Model):
    """Asynchronous: no rank waits."""

    _name = "asp"


@dataclasses.dataclass(frozen=True)
class SSP(Model):
    """Stale synchronous: a rank may lead the slowest by s iterations.

    cached: an optimizer exchanges nothing while its parameters are at most s iterations old (worker-cached SSP of the
    modular parameter server, listing 4.4). It adds up its changes, sends the sum with every iteration s + 1, and waits
    there until all ranks have sent theirs. Conditions that are set later count these exchanges.
    """

    _name = "ssp"
    s: int
    cached: bool = False

    @property
    def alone(self) -> int:
        """The iterations for which cached parameters suffice."""
        return self.s if self.cached else 0

    @property
    def exchanged(self) -> str | None:
        """Cached: of s + 1 iterations at once, the listing's bound of s leaves 0 in exchanges."""
        return "ssp:0" if self.cached else self.declared


@dataclasses.dataclass(frozen=True)
class DSPS(Model):
    """SSP whose s the servers adjust between low and high while training runs, so that the fastest rank waits least."""

    _name = "dsps"
    low: int = 3
    high: int = 15


@dataclasses.dataclass(frozen=True)
class PSSP(Model):
    """SSP that delays a rank that leads by s or more with probability c; c = 1 is SSP, 0 is ASP."""

    _name = "pssp"
    s: int
    c: float
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class DynamicPSSP(Model):
    """PSSP with probability alpha / (1 + e^(s - lead)).

    alpha: a number in [0, 1], or "significance": |gradient| / |weights| of the rank's newest iteration.
    """

    _name = "dynamic-pssp"
    s: int
    alpha: float | str = "significance"
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class DropStragglers(Model):
    """BSP that closes an iteration when nt ranks have pushed, and drops later pushes of it."""

    _name = "drop-stragglers"
    nt: int


@dataclasses.dataclass(frozen=True)
class Adaptive(Model):
    """Ranks run freely until one leads by s iterations, or the slowest has done w since the last barrier.

    Both hold for ranks of equal speed; the servers raise them as the ranks' iteration times and the processor loads of
    their machines differ. `paceline.supersteps()` returns the current ones.
    """

    _name = "adaptive"
    s: int = 3
    w: int = 3


@dataclasses.dataclass(frozen=True)
class ElasticBSP(Model):
    """Ranks run freely up to a barrier, placed where they wait least within r predicted iterations of each rank."""

    _name = "elastic"
    r: int = 15


@dataclasses.dataclass(frozen=True)
class Expression(Model):
    """Conditions of your own, over progress, lead, V, N, count[i], fastest, slowest and significance.

    pull: when a rank may continue, such as "lead < 3 || significance < 0.01". push: when an iteration closes, such as
    "count[V] >= 0.9 * N". An empty condition is BSP's.
    """

    pull: str
    push: str = ""

    @property
    def setting(self) -> str:
        """The model's text."""
        return f"expression:{self.pull};{self.push}" if self.push else f"expression:{self.pull}"


@dataclasses.dataclass(frozen=True)
class _Named(Model):
    """A model given as a setting."""

    text: str

    @property
    def setting(self) -> str:
        """The text itself."""
        return self.text


def model_of(sync: Any) -> Model:
    """The model that an argument names: a Model, a setting such as "ssp:3", or None for PACELINE_SYNC's."""
    if isinstance(sync, Model):
        return sync
    if sync is None:
        if not engine.is_initialized():
            return BSP()
        return _Named(engine.setting("sync"), parking=engine.setting("parking"))
    if not isinstance(sync, str):
        raise ValueError(f"sync={sync!r}: give a model such as paceline.SSP(3), or a setting such as 'ssp:3'")
    return _Named(sync)


def check(model: Model, workers: int | None, accumulate: bool) -> None:
    """Raises ValueError, which says what is allowed, for a model that so many workers cannot run.

    workers: None for a process set that is not registered; the operation then raises.
    """
    if workers is None:
        return
    engine.check_sync(model.setting, model.soft_park, accumulate, workers)


def significance(gradients: Iterable[float], weights: Iterable[float]) -> float:
    """|gradients| / |weights|, clipped to [0, 1]: the L2 norms of the arrays are given.

    1 where there is no ratio: without weights, and of what is not finite, so that a training goes on as with others.
    """
    whole = math.hypot(*weights)
    ratio = math.hypot(*gradients) / whole if 0 < whole < math.inf else math.nan
    return ratio if ratio < 1 else 1.0


def set_pull_condition(condition: Model | str, names: Sequence[str] = (), servers: Sequence[int] = ()) -> int:
    """Changes the pull condition of tensors in use while training runs: when a rank may continue. One rank calls it.

    condition: a model whose pull condition to use, or an expression such as "lead < 3". names: patterns of tensors'
    names ("value.*"); without them, every held value and every tensor that was declared with a model. servers: indices
    of the servers that change, without them all; different servers can run different models.

    Returns the iteration from which it applies to each of the keys: the one after the latest that any rank has pushed
    of any of them. Pulls that wait then are checked again. Raises ValueError, and changes nothing, if one of the
    tensors cannot use the condition.
    """
    return _set("pull", condition, names, servers)


def set_push_condition(condition: Model | str, names: Sequence[str] = (), servers: Sequence[int] = ()) -> int:
    """Changes the push condition: when an iteration closes. Otherwise as `set_pull_condition`."""
    return _set("push", condition, names, servers)


def _set(which: str, condition: Model | str, names: Sequence[str], servers: Sequence[int]) -> int:
    if isinstance(condition, str):
        condition = Expression(condition) if which == "pull" else Expression("", condition)
    if not isinstance(condition, Model):
        example = "lead < 3" if which == "pull" else "count[V] >= N - 1"
        raise ValueError(
            f"condition={condition!r}: give a model such as paceline.SSP(3), or a text such as {example!r}"
        )
    if isinstance(names, str):
        names = [names]
    names = list(names) if isinstance(names, Iterable) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f'names={names!r}: give patterns of names, such as ["value.*"]')
    try:
        indices = [operator.index(server) for server in servers]
    except TypeError:
        raise ValueError(f"servers={servers!r}: give indices of servers, such as [0, 1]") from None
    return engine.set_condition({which: condition.setting, "names": names, "servers": indices})
