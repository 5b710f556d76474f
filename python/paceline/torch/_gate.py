"""The changes that a rank withholds under `DistributedOptimizer(gate=...)`."""

from __future__ import annotations

import io
import itertools
import warnings
import weakref
from collections.abc import Callable, Mapping

import torch

from paceline.common import checkpoint
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.common.significance import Significance


class Gate:
    """Withholds changes that are not significant and adds them up, for each parameter.

    names: of the parameters, which identify them in a checkpoint; parameters without a name are in none.
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
        self._withheld: dict[torch.Tensor, torch.Tensor] = {}
        self._loads = _gates.loads

    def offer(
        self, p: torch.Tensor, contribution: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The change to send for a parameter: the contribution plus what was withheld, or None to withhold both.

        weights: the values to compare with, by default the parameter's. contribution does not change unless it is
        returned. Changes that are not finite are always sent.
        """
        self._claim(p)
        withheld = self._withheld.pop(p, None)
        total = contribution if withheld is None else withheld.add_(contribution)
        if _norm(total) < self._rule.at(self._iteration) * _norm((p if weights is None else weights).detach()):
            self._withheld[p] = total.clone() if total is contribution else total
            return None
        return total

    def withheld(self, p: torch.Tensor) -> torch.Tensor | None:
        """The withheld change of a parameter."""
        self._claim(p)
        return self._withheld.get(p)

    def clock(self) -> None:
        """Ends an iteration: the threshold decays."""
        self._iteration += 1

    def clear(self) -> None:
        """Drops what is withheld."""
        self._withheld.clear()

    def _claim(self, p: torch.Tensor) -> None:
        """Restores what was loaded for a parameter, at its first use after the load."""
        if self._loads != _gates.loads:
            self._begin()
        if not _gates.unclaimed or p not in self._names:
            return
        iteration, withheld = _gates.unclaimed.pop(self._key(p), (1, None))
        self._iteration = max(self._iteration, iteration)
        if withheld is not None and withheld.shape == p.shape:
            self._withheld[p] = withheld.to(p)
        elif withheld is not None:
            warnings.warn(
                f"{self._names[p]!r} has shape {tuple(p.shape)}, and what the state holds back of it "
                f"{tuple(withheld.shape)}: that is dropped",
                stacklevel=3,
            )

    def _key(self, p: torch.Tensor) -> tuple[int | None, str]:
        return self._process_set.process_set_id, self._names[p]

    def state(self) -> _State:
        """The state to save; none if a state was loaded since the last use."""
        if self._loads != _gates.loads or self._process_set.process_set_id is None:
            return {}
        return {self._key(p): (self._iteration, self._withheld.get(p)) for p in self._names}


# (process set, name of the parameter) -> (iteration of the gate, withheld change)
_State = dict[tuple[int | None, str], tuple[int, torch.Tensor | None]]


class _Gates:
    """All gates of this process, as a part of its checkpoint.

    A loaded state waits here until a gate uses a parameter of its name: the gate may not exist yet.
    """

    def __init__(self) -> None:
        self.loads = 0
        self.unclaimed: _State = {}
        self._gates: weakref.WeakValueDictionary[int, Gate] = weakref.WeakValueDictionary()
        self._number = itertools.count()

    def add(self, gate: Gate) -> None:
        self._gates[next(self._number)] = gate

    def state(self) -> bytes:
        """The state of all gates. If several have a parameter of one name, that of the newest."""
        state: _State = {}
        for _, gate in sorted(self._gates.items()):
            state.update(gate.state())
        state.update(self.unclaimed)
        if not state:
            return b""
        buffer = io.BytesIO()
        saved = {key: (i, None if change is None else change.cpu()) for key, (i, change) in sorted(state.items())}
        torch.save(saved, buffer)
        return buffer.getvalue()

    def reader(self, state: bytes) -> Callable[[], None]:
        loaded: _State = {}
        try:
            if state:
                loaded = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
            for (number, name), (iteration, change) in loaded.items():
                if [type(number), type(name), type(iteration)] != [int, str, int] or iteration < 1:
                    raise TypeError
                if change is not None and type(change) is not torch.Tensor:
                    raise TypeError
                if change is not None:
                    loaded[number, name] = iteration, change.detach().contiguous()  # own memory, no hooks
        except Exception as e:  # torch.load raises KeyError, IndexError, struct.error and others for broken bytes
            raise ValueError("these bytes are not what gates hold back") from e

        def restore() -> None:
            self.loads += 1
            self.unclaimed = loaded

        return restore


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """The L2 norm, for float16 in float32: in float16 that of many elements is infinite."""
    return torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


_gates = _Gates()
checkpoint.register("torch.gates", _gates)
