"""The state of a PyTorch training: models, optimizers and samplers, each kept by a handler, and Python objects."""

from __future__ import annotations

import copy
from typing import Any

import torch

from paceline.common.elastic import ObjectState
from paceline.common.engine import engine
from paceline.torch._gradient_hooks import GradientHooks
from paceline.torch._traveling import packed, unpacked
from paceline.torch.elastic.sampler import ElasticSampler
from paceline.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from paceline.torch.mpi_ops import rank


class StateHandler:
    """Keeps one object of a TorchState: base of the handlers."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Saves the object's state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives every rank rank 0's state, and saves it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts the object to other ranks."""

    def set_value(self, value: Any) -> None:
        """Keeps another object from now on."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """Of an object with state_dict and load_state_dict."""

    def save(self) -> None:
        """Saves a copy of the object's state_dict."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Loads a copy of what was saved, which the object may keep and change."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Loads rank 0's state_dict, and saves it."""
        own = self.value.state_dict()
        self.value.load_state_dict(unpacked(broadcast_object(packed(own)), own, torch.device("cpu")))
        self.save()


class ModelStateHandler(_StateDictHandler):
    """Of a torch.nn.Module."""

    def sync(self) -> None:
        """Fills the parameters and buffers with rank 0's, and saves them."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_StateDictHandler):
    """Of a torch.optim.Optimizer, or the result of DistributedOptimizer."""

    def restore(self) -> None:
        """Loads a copy of what was saved, and clears gradients: the step that was lost had no more use of its own."""
        super().restore()
        # Also where changes are in flight, which end with the round: without DistributedOptimizer's check.
        clears: Any = super(GradientHooks, self.value) if isinstance(self.value, GradientHooks) else self.value
        clears.zero_grad()

    def reset(self) -> None:
        """Counts the backward passes of a step anew: ranks that join have made none of it."""
        if isinstance(self.value, GradientHooks):
            self.value.set_backward_passes_per_step(self.value.backward_passes_per_step)

    def sync(self) -> None:
        """Fills state and options with rank 0's, and saves them."""
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class LRSchedulerStateHandler(_StateDictHandler):
    """Of a learning rate scheduler."""


class SamplerStateHandler(_StateDictHandler):
    """Of an ElasticSampler."""

    def reset(self) -> None:
        """Deals out the rest of the epoch anew."""
        self.value.reset()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, LRSchedulerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """(type, handler) of objects that a TorchState does not pickle; the first match counts."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replaces the handlers of states that are made from now on."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """The state of a training: model, optimizer, and what else is given by name.

    Each is an attribute. Models, optimizers, learning rate schedulers and ElasticSamplers have handlers; other values
    are pickled.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        handlers = {name: handler for name, value in kwargs.items() if (handler := _handler_of(value)) is not None}
        self._handlers: dict[str, StateHandler] = handlers
        for name, handler in handlers.items():
            super().__setattr__(name, handler.value)
        super().__init__(broadcast_object, rank, **{n: v for n, v in kwargs.items() if n not in handlers})

    def save(self) -> None:
        """Saves everything in memory: a loss that shows in what is in flight leaves what was saved before."""
        engine.rest()
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Goes back to what was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Gives every rank rank 0's state, and saves it."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Adapts samplers to other ranks."""
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
