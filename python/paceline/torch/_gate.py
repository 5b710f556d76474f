"""What a rank holds back under `DistributedOptimizer(gate=...)`."""

from __future__ import annotations

import io
import itertools
import warnings
import weakref
from collections.abc import Callable, Mapping

import torch

from paceline import _checkpoint
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.significance import Significance


class Gate:
    """Adds up what is not significant enough to be sent, for each parameter.

    names: of the parameters, by which a checkpoint knows them; others are in none.
    """

    def __init__(
        self,
        rule: Significance,
        names: Mapping[torch.Tensor, str] | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self._rule = rule
        self._names = {} if names is None else names
        self._process_set = process_set
        self._begin()
        _gates.add(self)

    def _begin(self) -> None:
        self._iteration = 1
        self._held: dict[torch.Tensor, torch.Tensor] = {}
        self._loads = _gates.loads

    def offer(
        self, p: torch.Tensor, contribution: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """What to send for a parameter: the contribution with all that was held back, or None for nothing.

        weights: what to measure it by, if not the parameter as it is. contribution is left as it is. What is not
        finite is always sent.
        """
        self._claim(p)
        held = self._held.pop(p, None)
        total = contribution if held is None else held.add_(contribution)
        if _norm(total) < self._rule.at(self._iteration) * _norm((p if weights is None else weights).detach()):
            self._held[p] = total.clone() if total is contribution else total
            return None
        return total

    def held(self, p: torch.Tensor) -> torch.Tensor | None:
        """What is held back of a parameter."""
        self._claim(p)
        return self._held.get(p)

    def clock(self) -> None:
        """Ends an iteration: the threshold decays."""
        self._iteration += 1

    def clear(self) -> None:
        """Forgets what is held back."""
        self._held.clear()

    def _claim(self, p: torch.Tensor) -> None:
        """Takes in what was loaded of a parameter, when it is used for the first time since."""
        if self._loads != _gates.loads:
            self._begin()
        if not _gates.unclaimed or p not in self._names:
            return
        iteration, held = _gates.unclaimed.pop(self._key(p), (1, None))
        self._iteration = max(self._iteration, iteration)
        if held is not None and held.shape == p.shape:
            self._held[p] = held.to(p)
        elif held is not None:
            warnings.warn(
                f"{self._names[p]!r} has shape {tuple(p.shape)}, and what the state holds back of it "
                f"{tuple(held.shape)}: that is dropped",
                stacklevel=3,
            )

    def _key(self, p: torch.Tensor) -> tuple[int, str]:
        return self._process_set.process_set_id, self._names[p]

    def state(self) -> _State:
        """What is to be saved; nothing where something has been loaded since and is still to be used."""
        if self._loads != _gates.loads or self._process_set.process_set_id is None:
            return {}
        return {self._key(p): (self._iteration, self._held.get(p)) for p in self._names}


# (process set, name of the parameter) -> (iteration of the gate, what it holds back)
_State = dict[tuple[int, str], tuple[int, torch.Tensor | None]]


class _Gates:
    """All gates of this process, as a part of its checkpoint.

    What is loaded waits here for the gate that uses a parameter of the name, which may not be made yet.
    """

    def __init__(self) -> None:
        self.loads = 0
        self.unclaimed: _State = {}
        self._gates: weakref.WeakValueDictionary[int, Gate] = weakref.WeakValueDictionary()
        self._number = itertools.count()

    def add(self, gate: Gate) -> None:
        self._gates[next(self._number)] = gate

    def state(self) -> bytes:
        """Where gates have parameters of one name, that of the newest."""
        state: _State = {}
        for _, gate in sorted(self._gates.items()):
            state.update(gate.state())
        state.update(self.unclaimed)
        if not state:
            return b""
        buffer = io.BytesIO()
        torch.save({key: (i, None if held is None else held.cpu()) for key, (i, held) in sorted(state.items())}, buffer)
        return buffer.getvalue()

    def reader(self, state: bytes) -> Callable[[], None]:
        loaded: _State = {}
        try:
            if state:
                loaded = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
            for (number, name), (iteration, held) in loaded.items():
                if [type(number), type(name), type(iteration)] != [int, str, int] or iteration < 1:
                    raise TypeError
                if held is not None and type(held) is not torch.Tensor:
                    raise TypeError
                if held is not None:
                    loaded[number, name] = iteration, held.detach().contiguous()  # of its own memory, without hooks
        except Exception as e:  # torch.load raises KeyError, IndexError, struct.error and others for broken bytes
            raise ValueError("these bytes are not what gates hold back") from e

        def take_in() -> None:
            self.loads += 1
            self.unclaimed = loaded

        return take_in


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """The L2 norm; of float16 in float32, or that of many elements is infinite, and nothing counts beside it."""
    return torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


_gates = _Gates()
_checkpoint.register("torch.gates", _gates)
