"""What all optimizers that DistributedOptimizer makes have in common."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

if TYPE_CHECKING:
    # Stands for the wrapped optimizer's class, which is the other base of each instance's class. Any: a variable of
    # that class can have the result of DistributedOptimizer.
    class Wrapped(torch.optim.Optimizer, Any):  # type: ignore[misc]
        """The wrapped optimizer."""
else:
    Wrapped = object


class Distributed(Wrapped):
    """The result of `DistributedOptimizer`: an optimizer of the wrapped one's class with these methods.

    `DistributedOptimizer` makes a class of one that is derived from this, and of the wrapped optimizer's.
    """

    _parameter_names: dict[torch.Tensor, str]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, from the next step on, on every rank."""
        super().add_param_group(param_group)
        number, group = len(self.param_groups) - 1, self.param_groups[-1]["params"]
        for place, p in enumerate(group):
            self._parameter_names.setdefault(p, f"noname.{number}.{place}")

    def synchronize(self) -> None:
        """Waits until the gradients are reduced. Call it before using them, and step within `skip_synchronize`."""
        raise NotImplementedError

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """A context in which `step` does not synchronize, because `synchronize` was called before."""
        raise NotImplementedError

    def agree(self) -> None:
        """Gives all ranks the same parameters, under models that let ranks run ahead. Every rank calls it."""
        raise NotImplementedError

    def __reduce_ex__(self, *_: Any) -> NoReturn:
        """Raises TypeError: hooks and operations in flight belong to this object and to its model's parameters."""
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: save its state_dict(), wrap a new optimizer of the "
            "copied model by DistributedOptimizer, and load the state_dict there"
        )

    # The wrapped optimizer's class may have its own.
    __copy__ = __deepcopy__ = __reduce__ = __reduce_ex__


Step = TypeVar("Step")


def hooked(step: Step) -> Step:
    """Marks a `step`: PyTorch calls step hooks around the wrapped optimizer's step, and only there."""
    step.hooked = True  # type: ignore[attr-defined]
    return step
