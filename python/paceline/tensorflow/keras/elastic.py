"""Horovod's elastic training for Keras: `@hvd.elastic.run`, a state, and callbacks that keep it."""

from __future__ import annotations

from typing import Any

from paceline.common.elastic import State
from paceline.tensorflow.elastic import TensorFlowKerasState, run
from paceline.tensorflow.keras._version import keras

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class KerasState(TensorFlowKerasState):
    """The state of a training with Keras: see paceline.tensorflow.elastic.TensorFlowKerasState."""


class CommitStateCallback(keras.callbacks.Callback):
    """Commits the state every batches_per_commit batches and at the end of each epoch.

    Give it last, after the callbacks that change the state.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit={batches_per_commit}: at least 1")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Counts from here, so that all ranks commit at the same batches."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits if it is time to."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keeps the number of the last batch in `state.batch`, counted from the begin of fit, and 0 at the end of an epoch.

    A fit that goes on after a change begins its epoch anew, unless it is told otherwise. Its steps_per_epoch is for all
    of its epochs.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets how long epochs were in another job."""
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes how many batches are left, for callbacks that show the progress."""
        steps = (self.params or {}).get("steps")
        if steps:
            self.steps_per_epoch = self.steps_per_epoch or steps
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begins anew."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keeps the number of epochs that are done in `state.epoch`, over all calls of fit.

    fit has what is left, `epochs=total - state.epoch`, or counts on: `epochs=total, initial_epoch=state.epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch: int = self.state.epoch
        self._first: int | None = None  # by fit's count

    def on_train_begin(self, logs: Any = None) -> None:
        """Counts from the state's epoch."""
        self.initial_epoch, self._first = self.state.epoch, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes where fit begins to count."""
        self._first = epoch if self._first is None else self._first

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts the epoch."""
        self.state.epoch = self.initial_epoch + epoch - (self._first or 0) + 1
