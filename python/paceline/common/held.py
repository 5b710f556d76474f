"""An optimizer's parameters under models that let ranks run ahead: each rank steps alone, and the servers hold them.

For frameworks whose parameters are arrays with names that change in place. PyTorch's optimizer makes the same steps
(`torch/_held_optimizer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from paceline.common import abi
from paceline.common.declaring import declaring
from paceline.common.engine import engine
from paceline.common.gate import Arrays, Gate, Gates
from paceline.common.handles import start, synchronize
from paceline.common.objects import newest
from paceline.common.operation import Held, Options, operation
from paceline.common.process_sets import ProcessSet, process_set_number
from paceline.common.significance import Significance
from paceline.common.sync import Model, check


class Use(NamedTuple):
    """One operation on a held parameter."""

    name: str
    parameter: Any  # the array itself, which the result replaces if the use reads
    change: Any  # what it adds; None: zeros, which are not sent
    held: Held
    root: int = 0
    priority: int = 0


class Framework(Arrays, Protocol):
    """What held parameters do with a framework's arrays."""

    def difference(self, new: Any, old: Any) -> Any:
        """new - old, which old may become."""

    def change(self, parameter: Any, by: Any) -> None:
        """Adds to a parameter."""

    def exchange(self, uses: Sequence[Use], op: int, process_set: ProcessSet, options: Options) -> None:
        """Has the engine run the operations. What uses the parameters afterwards waits for them."""

    def settle(self, arrays: Sequence[Any]) -> None:
        """Waits for the operations on arrays so far. Raises what went wrong in them."""

    def most(self, number: int, process_set: ProcessSet) -> int:
        """The greatest of the ranks' numbers."""


class HeldParameters:
    """What one optimizer of this rank holds on the servers.

    `begin`, the optimizer's own step, then `end` are one iteration. names of parameters are the same on all ranks.
    """

    def __init__(
        self,
        framework: Framework,
        gates: Gates,
        model: Model,
        op: int,
        process_set: ProcessSet,
        codec: str | None,
        gate: Significance | None,
        pull_gate: Significance | None,
    ) -> None:
        check(model, process_set.size(), accumulate=True)
        self._framework, self._model = framework, model
        self._op, self._process_set = op, process_set
        self._options = Options(model.exchanged, model.soft_park, codec, pull_gate)
        self._names: dict[str, str] = {}  # of the gate's parameters, by themselves
        self._gate = None if gate is None else Gate(gates, gate, self._names, process_set)
        self._generation = engine.generation
        self._begin()

    def _begin(self) -> None:
        self._values: dict[str, tuple[str, Any]] = {}  # by name: that of the value, and the parameter
        self._groups: list[tuple[str, list[str]]] = []  # with supersteps: by first value
        self._age = 0  # steps since the last exchange
        self._kept: dict[str, Any] = {}  # changes since then, which the next exchange sends
        self._exchanges = 0

    def begin(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Before the optimizer's step: declares parameters that are new, and returns copies for `end`."""
        self._forget()
        self._declare({name: p for name, p in parameters.items() if name not in self._values})
        return {name: self._framework.copy(p) for name, p in parameters.items()}

    def _forget(self) -> None:
        """Drops the declarations after a join or another init, which empties the servers."""
        if self._generation != engine.generation:
            self._generation = engine.generation
            self._begin()
            if self._gate is not None:
                self._gate.clear()

    def end(
        self, parameters: Mapping[str, Any], before: Mapping[str, Any], significance: float = 0.0, whole: bool = True
    ) -> None:
        """After the optimizer's step: exchanges what it changed, or keeps that for a later iteration.

        significance: |gradient| / |weights|, for models that use it. whole: the step is that of all parameters; that of
        some is a part of an iteration of the gate, which `clock` ends.
        """
        changes = {name: self._framework.difference(p, before[name]) for name, p in parameters.items()}
        for name, kept in [(name, self._kept.pop(name, None)) for name in changes]:
            if kept is not None:
                changes[name] = self._framework.add(kept, changes[name])
        if self._age < self._model.alone:
            self._kept |= changes
            self._age += 1
            return
        sent: dict[str, Any] = changes
        if self._gate is not None:
            sent = {name: self._gate.offer(name, change, parameters[name]) for name, change in changes.items()}
            if whole:
                self._gate.clock()
        if self._groups:
            self._framework.settle(list(changes.values()))  # the iteration ends with its changes
        number = process_set_number(self._process_set)
        within = {n for group, names in self._groups if not engine.end_iteration(number, group) for n in names}
        alone, waits = abi.ADD | abi.READ_NOW | abi.WITHIN, abi.ADD | abi.READ
        self._exchange({n: (alone if n in within else waits, change) for n, change in sent.items()}, significance)
        if self._groups:
            self._framework.settle(list(parameters.values()))
        for group, _ in self._groups:
            engine.begin_iteration(number, group)
        self._age, self._exchanges = 0, self._exchanges + 1
        if self._gate is not None:
            for name, p in parameters.items():
                if (withheld := self._gate.withheld(name, p)) is not None:
                    self._framework.change(p, withheld)

    def clock(self) -> None:
        """Ends an iteration of the gate."""
        if self._gate is not None:
            self._gate.clock()

    def _declare(self, parameters: Mapping[str, Any]) -> None:
        if not parameters:
            return
        with declaring(self._process_set) as name_of:
            names = {name: name_of(name) for name in parameters}
            first = next(iter(names.values()))
            held = Held(abi.DECLARE, group=first if self._model.has_supersteps else None)
            root = newest(self._process_set, first)
            uses = [Use(names[name], p, p, held, root) for name, p in parameters.items()]
            self._framework.exchange(uses, self._op, self._process_set, self._options)
            self._framework.settle(list(parameters.values()))
        for name, p in parameters.items():
            self._names[name] = name
            self._values[name] = names[name], p
        if held.group is not None:
            self._groups.append((held.group, list(parameters)))

    def _exchange(self, changes: Mapping[str, tuple[int, Any]], significance: float = 0.0) -> None:
        """Operations on the parameters: of each its use, and what it adds."""
        place = {name: i for i, name in enumerate(self._values)}  # the next forward pass needs the first ones first
        uses = [
            Use(*self._values[name], change, Held(use, significance), priority=-place[name])
            for name, (use, change) in changes.items()
        ]
        self._framework.exchange(uses, self._op, self._process_set, self._options)

    def agree(self) -> None:
        """Waits for all ranks, then gives them the same parameters: the sum of all their changes.

        Every rank calls it, at the end of training or before a checkpoint. Changes that a gate withholds are not in it.
        """
        self._forget()
        parameters = [p for _, p in self._values.values()]
        self._framework.settle(parameters)  # this rank's own changes have arrived
        if self._model.alone:
            self._send_kept()
            self._framework.settle(parameters)
        self._barrier()
        self._exchange(dict.fromkeys(self._values, (abi.READ_NOW | abi.EXACT, None)))
        self._framework.settle(parameters)
        self._barrier()  # no rank continues before all have read

    def _send_kept(self) -> None:
        """Ends the exchange that is not due yet on every rank, so that all are at the same one afterwards."""
        self._exchanges += 1
        # Also where nothing is kept: others may wait for this exchange. The current values are read, and then replaced.
        add = abi.ADD | abi.READ_NOW
        self._exchange({name: (add, self._kept.pop(name, None)) for name in self._values})
        self._age = 0
        most = self._framework.most(self._exchanges, self._process_set)
        while self._exchanges < most:  # of a rank that made more iterations
            self._exchanges += 1
            self._exchange(dict.fromkeys(self._values, (add, None)))

    def _barrier(self) -> None:
        op = operation(abi.BARRIER, abi.UINT8, (0,), 0, 0, process_set=process_set_number(self._process_set))
        synchronize(start([op], lambda _: None, at_once=True))
