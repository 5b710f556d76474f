"""Horovod's elastic training for TensorFlow and Keras: `@hvd.elastic.run` and states."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import tensorflow as tf

from paceline.common.basics import rank, rejoin
from paceline.common.elastic import ObjectState, State, run_fn
from paceline.common.exceptions import HorovodInternalError
from paceline.tensorflow._variables import given_to
from paceline.tensorflow.functions import broadcast_object, broadcast_variables

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run", "run_fn"]

_Result = TypeVar("_Result")


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorates a training function, whose first argument is a state, so that it goes on after a change of its ranks.

    The function is called again after each change, with the state that was committed last (a rank is lost) or as it is
    (ranks join or leave); see `paceline.common.elastic.run_fn`. Start the job by `paceline run --min-np`.

    A tf.function of allreduces, broadcasts and allgathers need not be traced again. One with reducescatters, process
    sets or the gradients of gathers is made for a size: tf.errors.InvalidArgumentError, unless the training function
    makes it anew.
    """

    @functools.wraps(func)
    def translated(state: State, *args: Any, **kwargs: Any) -> _Result:
        try:
            return func(state, *args, **kwargs)
        except tf.errors.UnknownError as e:  # of an operation in a graph
            if "Paceline" not in str(e):
                raise
            raise HorovodInternalError(e.message) from e

    return run_fn(translated, rejoin)


class _VariablesState(ObjectState):
    """Variables, and what else is given by name."""

    def __init__(self, variables: Iterable[Any], **kwargs: Any) -> None:
        self._tracked = list({id(v): v for v in variables}.values())
        self._copy()
        super().__init__(broadcast_object, rank, **kwargs)

    def _copy(self) -> None:
        self._copies = [tf.convert_to_tensor(v).numpy().copy() for v in self._tracked]

    def save(self) -> None:
        """Saves copies of the variables and of the attributes."""
        self._copy()
        super().save()

    def restore(self) -> None:
        """Goes back to what was saved last."""
        for variable, value in zip(self._tracked, self._copies, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Gives every rank rank 0's variables and attributes, and saves them."""
        if self._tracked:
            broadcast_variables(self._tracked, root_rank=0)
        self._copy()
        super().sync()


class TensorFlowState(_VariablesState):
    """The state of a training with a loop: variables, such as a model's and an optimizer's, and objects by name.

    variables: a list. Optimizers have built their slots: `optimizer.build(model.trainable_variables)`. session:
    Horovod's for TensorFlow 1; with one, ValueError, because sessions end with the job they were made for.
    """

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None or not tf.executing_eagerly():
            raise ValueError("TensorFlowState is for TensorFlow 2: it takes no session and no graph of TensorFlow 1")
        self.variables = list(variables if variables is not None else tf.compat.v1.global_variables())
        super().__init__(self.variables, **kwargs)


class TensorFlowKerasState(_VariablesState):
    """The state of a training with Keras: a model, its optimizer, and objects by name, such as batch=0, epoch=0.

    model: built, else ValueError. optimizer: by default the one that the model is compiled with. backend: Horovod's,
    without effect.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        from paceline.tensorflow.keras._version import build, variables_of

        if not model.built:
            raise ValueError("the model is not built: run model.build(input_shape) before the state is made")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        self.backend = backend
        if self.optimizer is not None:
            build(self.optimizer, model.trainable_variables)
        super().__init__([*model.weights, *variables_of(self.optimizer)], **kwargs)

    def restore(self) -> None:
        """Goes back to what was saved last."""
        super().restore()
        self._forget_passes()

    def reset(self) -> None:
        """Has the model trace its step anew, for the job of another size, and drops gradients of passes before it."""
        self.model.train_function = None
        self._forget_passes()

    def _forget_passes(self) -> None:
        passes = given_to(self.optimizer, "_paceline_passes")
        if passes is not None:
            passes.reset()
