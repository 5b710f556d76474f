"""Wait-free backpropagation where the servers hold the parameters: stepped and exchanged while backward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline._engine import engine
from paceline.common.exceptions import HorovodInternalError
from paceline.torch._gradient_hooks import Hooked
from paceline.torch._handles import synchronize
from paceline.torch._held_optimizer import AccumulatingOptimizer
from paceline.torch._ops_async import start_one


class WaitFreeOptimizer(AccumulatingOptimizer, Hooked):
    """Steps a copy of each parameter when its gradient is there, and sends the difference at once.

    What comes back waits until `step`, where the parameters change. `step` itself does what backward has left: all
    that is not declared yet, so the whole first iteration, and parameters without a gradient.
    """

    def __init__(
        self, optimizer, named_parameters, model, op, process_set, codec, gate, pull_gate, backward_passes_per_step
    ):
        super().__init__(optimizer, named_parameters, model, op, process_set, codec, gate, pull_gate)
        self._prepare(backward_passes_per_step)
        if self._distributed:
            self._watch_all()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, from the next step on, on every rank."""
        super().add_param_group(param_group)
        if self._distributed:
            self._watch(self.param_groups[-1]["params"])

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients. Raises AssertionError while what they did is being exchanged."""
        self._forget()
        super().zero_grad(*args, **kwargs)

    def _gradient_ready(self, p: torch.Tensor) -> None:
        self._forget()
        super()._gradient_ready(p)

    def _reduce(self, p: torch.Tensor) -> None:
        if p not in self._values:
            return
        stepped, reads = self._stepped(p), self._reads()
        difference = torch.empty_like(stepped, memory_format=torch.contiguous_format)
        torch.sub(stepped, p.detach(), out=difference)
        given = difference if self._gate is None else self._gate.offer(p, difference, stepped)
        # Adding and reading are one operation, so that SSP(0) reads what this iteration has made, and nothing newer.
        part = self._values[p].using(given, difference if reads else None, self._priority[p], 0.0)
        failure = None
        try:
            handle = start_one(part)
        except HorovodInternalError as e:  # it is for `step` to raise, as when the operation fails later
            failure = e

        def finish() -> None:
            if failure is not None:
                raise failure
            synchronize(handle)
            p.detach().copy_(difference if reads else stepped)
            if reads:
                self._add_held([p])

        self._in_flight[p] = finish

    def _forget(self) -> None:
        """Also lets go of what was sent to servers that hold nothing any more."""
        if self._generation != engine.generation:
            self._in_flight.clear()
            self.set_backward_passes_per_step(self.backward_passes_per_step)
        super()._forget()

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes the steps that backward has left, and waits for the parameters as the synchronisation model says.

        Returns the closure's loss, if any. Raises HorovodInternalError for what backward has sent, too.
        """
        if not self._distributed:
            return super().step(closure)
        self._hold()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with self._only(lambda params: [p for p in params if p not in self._in_flight]):
                super().step()
        finally:
            self._finish_all()
            self.set_backward_passes_per_step(self.backward_passes_per_step)
        return loss

    step.hooked = True

    def _step_own(self, closure: Callable[[], Any] | None) -> Any:
        before = [dict(group) for group in self.param_groups]
        loss = self._step_unhooked(closure)
        for group, old in zip(self.param_groups, before, strict=True):
            changed = [option for option, value in group.items() if option not in old or value is not old[option]]
            if changed:
                raise ValueError(
                    f"wait_free: the optimizer's step changes {', '.join(changed)} of all parameters together, so that "
                    "it cannot step them one by one; use wait_free=False"
                )
        return loss
