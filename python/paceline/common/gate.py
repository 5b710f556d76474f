"""The changes that a rank withholds under `gate=`, for every framework whose parameters are changed in place."""

from __future__ import annotations

import io
import itertools
import json
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

from paceline.common import checkpoint
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.common.significance import Significance

# (process set, name of the parameter) -> (iteration of the gate, withheld change)
State = dict[tuple[int, str], tuple[int, Any]]


class Arrays(Protocol):
    """What gates do with a framework's arrays."""

    def norm(self, array: Any) -> Any:
        """The L2 norm, a number or an array of one, for float16 in float32: of many elements it may be infinite."""

    def copy(self, array: Any) -> Any:
        """A copy."""

    def add(self, total: Any, contribution: Any) -> Any:
        """Their sum, in the place of total where arrays can be changed."""

    def restored(self, saved: Any, like: Any) -> Any:
        """A loaded change as an array like another; None if it has another shape."""

    def dump(self, state: State) -> bytes:
        """The bytes of a state that is not empty."""

    def load(self, data: bytes) -> State:
        """The state of such bytes. Raises any exception for others."""


class Gate:
    """Withholds changes that are not significant and adds them up, for each parameter.

    gates: the framework's. names: by parameter, or by what stands for one and can be hashed; they identify parameters
    in a checkpoint, and those without a name are in none.
    """

    def __init__(
        self,
        gates: Gates,
        rule: Significance,
        names: Mapping[Any, str],
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self._gates, self._arrays = gates, gates.arrays
        self._rule = rule
        self._names = names
        self._process_set = process_set
        self._begin()
        gates.add(self)

    def _begin(self) -> None:
        self._iteration = 1
        self._withheld: dict[Hashable, Any] = {}
        self._loads = self._gates.loads

    def offer(self, p: Any, contribution: Any, weights: Any = None) -> Any:
        """The change to send for a parameter: the contribution plus what was withheld, or None to withhold both.

        weights: the values to compare with, by default the parameter's. contribution does not change unless it is
        returned. Changes that are not finite are always sent.
        """
        self._claim(p, contribution)
        withheld = self._withheld.pop(p, None)
        total = contribution if withheld is None else self._arrays.add(withheld, contribution)
        norm = self._arrays.norm
        if norm(total) < self._rule.at(self._iteration) * norm(p if weights is None else weights):
            self._withheld[p] = self._arrays.copy(total) if total is contribution else total
            return None
        return total

    def withheld(self, p: Any, like: Any = None) -> Any:
        """The withheld change of a parameter. like: an array of its shape, by default p."""
        self._claim(p, p if like is None else like)
        return self._withheld.get(p)

    def clock(self) -> None:
        """Ends an iteration: the threshold decays."""
        self._iteration += 1

    def clear(self) -> None:
        """Drops what is withheld."""
        self._withheld.clear()

    def _claim(self, p: Any, like: Any) -> None:
        """Restores what was loaded for a parameter, at its first use after the load."""
        if self._loads != self._gates.loads:
            self._begin()
        if not self._gates.unclaimed or p not in self._names or self._process_set.process_set_id is None:
            return
        key = self._process_set.process_set_id, self._names[p]
        iteration, saved = self._gates.unclaimed.pop(key, (1, None))
        self._iteration = max(self._iteration, iteration)
        if saved is None:
            return
        withheld = self._arrays.restored(saved, like)
        if withheld is not None:
            self._withheld[p] = withheld
        else:
            warnings.warn(
                f"{self._names[p]!r} has shape {tuple(like.shape)}, and what the state holds back of it "
                f"{tuple(saved.shape)}: that is dropped",
                stacklevel=3,
            )

    def state(self) -> State:
        """The state to save; none if a state was loaded since the last use."""
        number = self._process_set.process_set_id
        if self._loads != self._gates.loads or number is None:
            return {}
        return {(number, name): (self._iteration, self._withheld.get(p)) for p, name in self._names.items()}


class Gates:
    """All gates of a framework in this process, as a part of its checkpoint: `name`.

    A loaded state waits here until a gate uses a parameter of its name: the gate may not exist yet.
    """

    def __init__(self, name: str, arrays: Arrays) -> None:
        self.arrays = arrays
        self.loads = 0
        self.unclaimed: State = {}
        self._gates: weakref.WeakValueDictionary[int, Gate] = weakref.WeakValueDictionary()
        self._number = itertools.count()
        checkpoint.register(name, self)

    def add(self, gate: Gate) -> None:
        """Makes a gate one of these."""
        self._gates[next(self._number)] = gate

    def state(self) -> bytes:
        """The state of all gates. If several have a parameter of one name, that of the newest."""
        state: State = {}
        for _, gate in sorted(self._gates.items()):
            state.update(gate.state())
        state.update(self.unclaimed)
        return self.arrays.dump(dict(sorted(state.items()))) if state else b""

    def reader(self, state: bytes) -> Callable[[], None]:
        """Reads a state and returns a function that restores it. Raises ValueError for other bytes."""
        loaded: State = {}
        try:
            if state:
                loaded = self.arrays.load(state)
            for (number, name), (iteration, _) in loaded.items():
                if [type(number), type(name), type(iteration)] != [int, str, int] or iteration < 1:
                    raise TypeError
        except Exception as e:  # broken bytes raise KeyError, IndexError, struct.error and others
            raise ValueError("these bytes are not what gates hold back") from e

        def restore() -> None:
            self.loads += 1
            self.unclaimed = loaded

        return restore


def dump(state: State) -> bytes:
    """The bytes of a state of NumPy arrays: for `Arrays` of frameworks without a format of their own."""
    import numpy as np  # which PyTorch's users need not have

    index: list[Any] = []
    arrays: dict[str, Any] = {}
    for i, ((number, name), (iteration, change)) in enumerate(state.items()):
        index.append([number, name, iteration, None if change is None else change.dtype.name])
        if change is not None:
            arrays[str(i)] = np.ascontiguousarray(change).reshape(change.shape)
    file = io.BytesIO()
    np.savez(file, index=np.frombuffer(json.dumps(index).encode(), np.uint8), **arrays)
    return file.getvalue()


def load(data: bytes) -> State:
    """The state that `dump` gave the bytes of. Raises any exception for others."""
    import numpy as np

    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        index = json.loads(file["index"].tobytes())
        return {
            (number, name): (iteration, None if dtype is None else file[str(i)])
            for i, (number, name, iteration, dtype) in enumerate(index)
        }
