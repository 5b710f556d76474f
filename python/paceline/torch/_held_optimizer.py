"""The optimizer for models that let ranks run ahead: each rank steps alone, and the servers hold the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch

from paceline.common.codec_tuning import resolved
from paceline.common.compression import Codec
from paceline.common.declaring import declaring
from paceline.common.engine import engine
from paceline.common.handles import synchronize
from paceline.common.objects import newest
from paceline.common.operation import Options
from paceline.common.operators import Max
from paceline.common.process_sets import ProcessSet, place_in, process_set_number
from paceline.common.seat import seat
from paceline.common.significance import Significance
from paceline.common.sync import Model, significance
from paceline.torch._distributed import Distributed, hooked
from paceline.torch._gate import Gate
from paceline.torch._ops import barrier
from paceline.torch._ops_async import allreduce_async_, start_group
from paceline.torch._parameters import byte_sizes, parameter_names
from paceline.torch.values import Value


class HeldOptimizer(Distributed):
    """Steps with this rank's own gradients, adds the change to the held parameters, and continues with these.

    The synchronisation model bounds how far ranks may be apart. The first `step` declares the held parameters, with the
    lowest rank's values, or after a join with those of the last rank to join. Other changes of parameters between steps
    are overwritten.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[Any] | None,
        model: Model,
        op: int,
        process_set: ProcessSet,
        codec: Codec | None = None,
        gate: Significance | None = None,
        pull_gate: Significance | None = None,
    ) -> None:
        self.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})  # a scheduler wraps step
        self._parameter_names = parameter_names(self.param_groups, named_parameters)
        self.op = op
        self.sync = model
        self.process_set = process_set
        self._gate = None if gate is None else Gate(gate, self._parameter_names, process_set)
        self._values: dict[torch.Tensor, Value] = {}
        self._groups: list[tuple[str, list[torch.Tensor]]] = []  # with supersteps: by first value
        self._generation = engine.generation
        self._age = 0  # steps since the last exchange
        self._kept: dict[torch.Tensor, torch.Tensor] = {}  # changes since then, which the next exchange sends
        self._exchanges = 0  # since the values were declared
        self._distributed = bool(process_set.included()) and (place_in(process_set)[1] > 1 or seat.elastic)
        if self._distributed:
            text = resolved(codec, byte_sizes(self.param_groups), process_set)
            self._options = Options(model.exchanged, model.soft_park, text, pull_gate)

    @hooked
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes the wrapped optimizer's step and exchanges the changes of the parameters, or keeps them for later.

        Waits as long as the synchronisation model requires. Returns the closure's loss, if any.
        """
        if not self._distributed:
            return self._step_own(closure)
        params = self._hold()
        before = [p.detach().clone(memory_format=torch.contiguous_format) for p in params]
        loss = self._step_own(closure)
        moved = _significance(params) if self.sync.asks_significance else 0.0
        for p, old in zip(params, before, strict=True):
            torch.sub(p.detach(), old, out=old)
        if not self._due():
            for p, difference in zip(params, before, strict=True):
                self._keep(p, difference)
            self._age += 1
            return loss
        sums = [self._with_kept(*change) for change in zip(params, before, strict=True)]
        changes: list[torch.Tensor | None] = list(sums)
        if self._gate is not None:
            changes = [self._gate.offer(*change) for change in zip(params, sums, strict=True)]
            self._gate.clock()
        if self._groups:
            _wait_until_computed(sums)  # the iteration ends with its changes
        within = self._end_iteration()
        self._exchange(params, changes, pull=True, significance=moved, within=within)
        for group, _ in self._groups:
            engine.begin_iteration(process_set_number(self.process_set), group)
        self._age, self._exchanges = 0, self._exchanges + 1
        self._add_withheld(params)
        return loss

    def _step_own(self, closure: Callable[[], Any] | None) -> Any:
        """The wrapped optimizer's step."""
        return super().step(closure)

    def _due(self) -> bool:
        """Whether this iteration exchanges parameters with the servers."""
        return self._age >= self.sync.alone

    def _keep(self, p: torch.Tensor, difference: torch.Tensor) -> None:
        """Adds to the parameter's change for the next exchange."""
        self._kept[p] = self._with_kept(p, difference)

    def _with_kept(self, p: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
        """The difference plus what was kept, which is no longer."""
        kept = self._kept.pop(p, None)
        return difference if kept is None else kept.add_(difference)

    def _hold(self) -> list[torch.Tensor]:
        """The parameters to exchange. Declares new ones."""
        self._forget()
        # A parameter that is frozen later stays: a superstep ends for a whole group, and a step may still change it.
        held = self._values
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad or p in held]
        self._declare([p for p in params if p not in held])
        return params

    def _forget(self) -> None:
        """Drops the declarations after a join or another init, which empties the servers."""
        if self._generation != engine.generation:
            self._generation = engine.generation
            self._values.clear()
            self._kept.clear()
            self._age = self._exchanges = 0
            if self._gate is not None:
                self._gate.clear()
            self._groups.clear()

    def _declare(self, params: list[torch.Tensor]) -> None:
        if not params:
            return
        with declaring(self.process_set) as name_of:
            names = [name_of(self._parameter_names[p]) for p in params]
            group = names[0] if self.sync.has_supersteps else None
            root = newest(self.process_set, names[0])
            values = {
                p: Value(p, name, self.sync, self.op, self.process_set, self._options)
                for p, name in zip(params, names, strict=True)
            }
            synchronize(start_group([value.declaring(p, root, group) for p, value in values.items()]))
        self._values.update(values)
        if group is not None:
            self._groups.append((group, params))

    def _end_iteration(self) -> set[torch.Tensor]:
        """The parameters whose superstep continues: this rank does not wait with these."""
        number = process_set_number(self.process_set)
        going_on = [params for group, params in self._groups if not engine.end_iteration(number, group)]
        return {p for params in going_on for p in params}

    def _add_withheld(self, params: list[torch.Tensor]) -> None:
        """Adds the withheld changes to this rank's parameters."""
        if self._gate is None:
            return
        for p in params:
            held = self._gate.withheld(p)
            if held is not None:
                p.detach().add_(held)

    def _exchange(
        self,
        params: Sequence[torch.Tensor],
        differences: Sequence[torch.Tensor | None],
        pull: bool,
        significance: float,
        within: Set[torch.Tensor],
    ) -> None:
        priority = {p: -i for i, p in enumerate(self._values)}  # the next forward pass needs the first parameters first
        parts = [
            self._values[p].using(difference, p if pull else None, priority[p], significance, p in within)
            for p, difference in zip(params, differences, strict=True)
        ]
        if parts:
            synchronize(start_group(parts))

    def agree(self) -> None:
        """Waits for all ranks, then gives them the same parameters: the sum of all their changes.

        Every rank calls it, at the end of training or before a checkpoint. Changes that a gate withholds are not in it.
        """
        if not self._distributed:
            return
        joined = engine.last_joined is not None and self._generation != engine.generation
        self._forget()
        if joined:
            self._hold()
        if self.sync.alone:
            self._send_kept()
        self._read()  # after this rank's own changes, so that these have arrived
        barrier(self.process_set)
        self._read()
        barrier(self.process_set)  # no rank continues before all have read

    def _send_kept(self) -> None:
        """Ends the exchange that is not due yet on every rank, so that all are at the same one afterwards."""
        self._exchanges += 1
        self._push([self._kept.pop(p, None) for p in self._values])  # also if empty: others may wait for this exchange
        self._age = 0
        made = torch.tensor(self._exchanges, device="cpu")
        most = synchronize(allreduce_async_(made, op=Max, process_set=self.process_set))
        while self._exchanges < most:  # a rank that made more iterations
            self._exchanges += 1
            self._push([None] * len(self._values))

    def _push(self, changes: Sequence[torch.Tensor | None]) -> None:
        self._exchange(list(self._values), changes, pull=False, significance=0.0, within=set())

    def _read(self) -> None:
        if self._values:
            synchronize(start_group([value.reading(p) for p, value in self._values.items()]))

    def synchronize(self) -> None:
        """Does nothing: `step` exchanges changes, and gradients are this rank's own."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Does nothing: see `synchronize`."""
        yield


def _significance(params: Sequence[torch.Tensor]) -> float:
    """|g| / |w| over all parameters that require gradients, L2, clipped to [0, 1]."""
    params = [p for p in params if p.requires_grad]
    gradients = (float(p.grad.norm()) for p in params if p.grad is not None)
    return significance(gradients, (float(p.detach().norm()) for p in params))


def _wait_until_computed(tensors: Iterable[torch.Tensor]) -> None:
    """Waits for the devices that compute while the program goes on."""
    for tensor in {t.device: t for t in tensors if t.device.type != "cpu"}.values():
        tensor.flatten()[:1].cpu()
