"""Horovod's elastic training for PyTorch: `@hvd.elastic.run`, states, and a sampler for ranks that come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paceline.common.basics import rejoin
from paceline.common.elastic import ObjectState, State, run_fn
from paceline.torch.elastic.sampler import ElasticSampler
from paceline.torch.elastic.state import (
    LRSchedulerStateHandler,
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)

__all__ = [
    "ElasticSampler",
    "LRSchedulerStateHandler",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "run_fn",
    "set_handler_registry",
]

_Result = TypeVar("_Result")


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorates a training function, whose first argument is a state, so that it goes on after a change of its ranks.

    The function is called again after each change, with the state that was committed last (a rank is lost) or as it is
    (ranks join or leave); see `paceline.common.elastic.run_fn`. Start the job by `paceline run --min-np`.
    """
    return run_fn(func, rejoin)
