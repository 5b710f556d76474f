"""Callbacks of Keras's training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from paceline.common.engine import engine
from paceline.common.operators import Average
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.tensorflow._variables import given_to
from paceline.tensorflow.functions import broadcast_variables
from paceline.tensorflow.keras._version import build, evaluated, keras, variables_of
from paceline.tensorflow.mpi_ops import allreduce


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives all ranks root_rank's model and optimizer: before training, or after the first batch if that builds them.

    device: Horovod's, without effect. local_variables: a variable, or variables, that keep their values on each rank.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local: list[Any] = []
        for variable in [local_variables] if hasattr(local_variables, "assign") else local_variables or ():
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leaves a variable its value on this rank: one of Keras, or the one of TensorFlow that it wraps."""
        self._local.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts if the model is built."""
        self.broadcast_done = False
        holding = given_to(self.model.optimizer, "_paceline_holding")
        if holding is not None and holding.outdated:
            self.model.make_train_function(force=True)
        if self.model.built:
            if self.model.optimizer is not None:
                build(self.model.optimizer, self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts after the first batch, if it was not possible before."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        # Not all variables: in Keras 3 these have the states of random generators, which are each rank's own.
        variables = [*self.model.weights, *variables_of(self.model.optimizer)]
        local = {id(v) for v in self._local}
        unique = {id(v): v for v in variables if not local & {id(v), id(getattr(v, "value", None))}}
        evaluated(broadcast_variables(unique.values(), self.root_rank))
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over the ranks, so that callbacks after it in the list see the averages."""

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces the numbers in logs, and the arrays and tensors of numbers."""
        given = {name: np.asarray(value) for name, value in sorted((logs or {}).items())}
        given = {name: value for name, value in given.items() if value.dtype.kind in "biuf"}
        if logs is None or not given:
            return
        values = np.concatenate([value.astype(np.float64).reshape(-1) for value in given.values()])
        averages = evaluated(allreduce(values, op=Average, process_set=self.process_set))
        for name, value in given.items():
            average, averages = averages[: value.size], averages[value.size :]
            logs[name] = average.reshape(value.shape) if value.ndim else float(average[0])


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to initial_lr times multiplier, from start_epoch up to end_epoch.

    multiplier: a function of the epoch, or a number m, which decays exponentially: m ** (epoch - start_epoch).
    staircase: once per epoch; otherwise before each batch, in fractions of epochs. steps_per_epoch: batches of an
    epoch, where Keras does not know.
    momentum_correction: Horovod's, without effect: Keras's momentum is a constant of the compiled step.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier: Callable[[float], float] = multiplier
        else:
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Learns how many batches an epoch has."""
        if not self.staircase and self.steps_per_epoch is None:
            known = self.params or {}
            self.steps_per_epoch = known.get("steps")
            if not self.steps_per_epoch and known.get("samples") and known.get("batch_size"):  # without eager execution
                self.steps_per_epoch = -(-known["samples"] // known["batch_size"])
            if not self.steps_per_epoch:
                raise ValueError("Keras does not know the number of batches of an epoch: give steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._set(epoch)
        elif not self.staircase:
            self._set(epoch + batch / (self.steps_per_epoch or 1))

    def _set(self, epoch: float) -> None:
        self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the rate as "lr"."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        rate = self.model.optimizer.learning_rate
        return float(evaluated(rate) if tf.is_tensor(rate) else rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from initial_lr / size to initial_lr, batch by batch, over warmup_epochs."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            size = engine.size()
            # At the end of an epoch's last batch the rate is that of the next epoch, as in Horovod.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the rate, and says on rank 0 that the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if epoch == (self.end_epoch or 0) - 1 and self.verbose > 0 and engine.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """keras.callbacks.ModelCheckpoint that saves only the best model so far.

    filepath: where; it may be set later, as an attribute. Positions are those of horovod.keras, or, where the third is
    True or False, of horovod.tensorflow.keras: monitor, verbose, save_weights_only, mode, save_freq.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str | bool = "auto",
        save_freq: Any = "epoch",
        filepath: Any = "",
        save_weights_only: bool = False,
    ) -> None:
        if isinstance(mode, bool):
            save_weights_only, mode = mode, "auto"
            if save_freq in ("auto", "min", "max"):
                mode, save_freq = save_freq, "epoch"
            if filepath == "epoch" or isinstance(filepath, int):
                save_freq, filepath = filepath, ""
        path = str(filepath) or ("best.weights.h5" if save_weights_only else "best.keras")
        super().__init__(
            path,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = str(filepath)
