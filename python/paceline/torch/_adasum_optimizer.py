"""The optimizer for op=Adasum: the ranks' steps are combined, not their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from paceline.common.compression import SupportsCompress
from paceline.common.handles import synchronize
from paceline.common.operation import How
from paceline.common.operators import Adasum
from paceline.common.process_sets import global_process_set
from paceline.torch._distributed import hooked
from paceline.torch._gradient_hooks import GradientHooks, Once, options_of
from paceline.torch._ops_async import reduction, start_one
from paceline.torch._parameter_check import ParameterCheck


class AdasumOptimizer(GradientHooks):
    """Steps each parameter with its own gradient and combines the steps of all ranks by Adasum.

    Adasum thus combines the changes that the wrapped optimizer makes, not the gradients. Parameters change in `step`,
    when all ranks' changes are combined.
    """

    _recipe = (
        "Under op=hvd.Adasum backward already steps with each gradient, so that a change comes too late: clip in a "
        "hook, p.register_hook(lambda grad: grad.clamp(-1, 1)), or use op=hvd.Average"
    )

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[Any] | None,
        compression: SupportsCompress,
        backward_passes_per_step: int,
    ) -> None:
        self._adopt(optimizer, named_parameters, compression, backward_passes_per_step)
        self._watch_all()
        self._check = ParameterCheck(global_process_set)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters; their steps are combined too."""
        super().add_param_group(param_group)
        self._watch(self.param_groups[-1]["params"])

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads options and state; waits for steps in flight and drops them."""
        with suppress(RuntimeError, ValueError):
            for p in self._missing(self._in_flight) if self._in_flight else ():  # other ranks may have made these
                self._reduce(p)
        self._end_in_flight()
        super().load_state_dict(*args, **kwargs)

    def _reduce(self, p: torch.Tensor) -> None:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        before = options_of(self.param_groups)
        compressed, context = self._compression.compress(self._stepped(p) - p.detach())
        self._check_options(before, "op=hvd.Adasum", "op=hvd.Average")
        name = f"allreduce.{self._parameter_names[p]}"
        handle = start_one(reduction(compressed, True, name, How(Adasum), self._watched[p].priority))

        def store(result: torch.Tensor) -> None:
            p.detach().add_(self._compression.decompress(result, context))

        self._in_flight[p] = Once(lambda: synchronize(handle), store)

    def synchronize(self) -> None:
        """Does nothing: `step` combines the ranks' steps."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Raises AssertionError: there is no step without combining."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer: its step waits")

    @hooked
    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Combines the steps of all ranks and adds them to the parameters. Returns the closure's loss, if any."""
        loss = closure() if closure is not None else None
        if not self._finish_interrupted():  # else this is the step that was
            self._watch_unfrozen()
            for p in self._missing(self._in_flight):
                self._reduce(p)
            self._finish_all()
        self._check.stepped(self._compared)
        return loss
