"""Wait-free backpropagation with held parameters: they are stepped and exchanged while backward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError
from paceline.common.handles import synchronize
from paceline.torch._distributed import hooked
from paceline.torch._gradient_hooks import GradientHooks, options_of
from paceline.torch._held_optimizer import HeldOptimizer
from paceline.torch._ops_async import start_one


class WaitFreeOptimizer(HeldOptimizer, GradientHooks):
    """Steps a copy of each parameter as soon as its gradient exists, and sends the difference at once.

    The parameters change in `step`, which stores the results. `step` also exchanges the parameters that backward did
    not: those without a gradient, and in the first iteration all, since none is declared yet.
    """

    _recipe = (
        "wait_free steps a parameter as soon as its gradient exists, so that a change comes too late: clip in a "
        "hook, p.register_hook(lambda grad: grad.clamp(-1, 1)), or use wait_free=False, where gradients may be changed "
        "before optimizer.step()"
    )

    def __init__(self, *held: Any, backward_passes_per_step: int) -> None:
        super().__init__(*held)
        self._prepare(backward_passes_per_step)
        if self._distributed:
            self._watch_all()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, from the next step on, on every rank."""
        super().add_param_group(param_group)
        if self._distributed:
            self._watch(self.param_groups[-1]["params"])

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients. Raises AssertionError while their changes are being exchanged."""
        self._forget()
        super().zero_grad(*args, **kwargs)

    def _gradient_ready(self, p: torch.Tensor) -> None:
        self._forget()
        super()._gradient_ready(p)
        if p not in self._in_flight:  # `step` steps it
            self._made.pop(p, None)

    def _reduce(self, p: torch.Tensor) -> None:
        if p not in self._values:
            return
        stepped = self._stepped(p)
        difference = torch.empty_like(stepped, memory_format=torch.contiguous_format)
        torch.sub(stepped, p.detach(), out=difference)
        if not self._due():

            def finish_alone() -> None:
                p.detach().copy_(stepped)
                self._keep(p, difference)

            self._in_flight[p] = finish_alone
            return
        change = self._with_kept(p, difference)
        given = change if self._gate is None else self._gate.offer(p, change, stepped)
        # Adding and reading are one operation, so that SSP(0) reads the result of this iteration and nothing newer.
        part = self._values[p].using(given, difference, self._watched[p].priority, 0.0)
        failure = None
        try:
            handle = start_one(part)
        except HorovodInternalError as e:  # `step` raises it, as it does if the operation fails later
            failure = e

        def finish() -> None:
            if failure is not None:
                raise failure
            synchronize(handle)
            p.detach().copy_(difference)
            self._add_withheld([p])

        self._in_flight[p] = finish

    def _forget(self) -> None:
        """Also drops the operations in flight to servers that were emptied since."""
        if self._generation != engine.generation:
            self._drop_in_flight()
        super()._forget()

    @hooked
    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the parameters that backward did not, and waits as long as the synchronisation model requires.

        Returns the closure's loss, if any. Raises HorovodInternalError also for exchanges that backward has started.
        """
        if not self._distributed:
            return super().step(closure)
        self._hold()
        self._watch_unfrozen()
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

    def _step_own(self, closure: Callable[[], Any] | None) -> Any:
        before = options_of(self.param_groups)
        loss = self._step_unhooked(closure)
        self._check_options(before, "wait_free", "wait_free=False")
        return loss
