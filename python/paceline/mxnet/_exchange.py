"""How the ranks of one optimizer share what they learn: their gradients before a step, or their changes after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from paceline.common import sync
from paceline.common.arguments import asked_of
from paceline.common.codec_tuning import LARGEST, resolved
from paceline.common.compression import Auto
from paceline.common.declaring import own_prefix
from paceline.common.engine import engine
from paceline.common.gate import Gate
from paceline.common.held import HeldParameters
from paceline.common.operation import How, Options
from paceline.common.operators import Average
from paceline.common.process_sets import ProcessSet, place_in
from paceline.common.significance import Significance
from paceline.common.sync import Model
from paceline.mxnet._held import arrays, gates
from paceline.mxnet.mpi_ops import reduce_


class Gradient(NamedTuple):
    """A gradient to reduce into its own array."""

    name: str
    gradient: Any
    weight: Any
    priority: int


class Exchange:
    """What `DistributedTrainer` and `DistributedOptimizer` have in common; both describe the arguments.

    names: of the gradients, or one that stands for all; another optimizer may have them too. sizes: bytes of the
    parameters, as far as they are known. A copy, or one that was pickled, begins anew.
    """

    def __init__(
        self,
        compression: Any,
        predivide: float,
        process_set: ProcessSet,
        sync: Model | str | None,
        gate: Significance | None,
        pull_gate: Significance | None,
        names: Collection[str],
        sizes: Sequence[int] = (),
    ) -> None:
        self.model, self.compressor, codec = asked_of(
            compression, process_set, sync, gate, pull_gate, predivide=predivide, before_init=True
        )
        self.process_set, self._predivide, self.asked = process_set, predivide, codec
        self._gate_rule, self._pull_gate, self._own = gate, pull_gate, names
        measures = isinstance(codec, Auto) and self.is_distributed
        self._codec = resolved(codec, sizes or [LARGEST], process_set) if measures else getattr(codec, "text", None)
        self._begin()

    def _begin(self) -> None:
        self._prefix: str | None = None  # None before the first step
        self._names: dict[str, str] = {}  # of the gate's parameters, by themselves
        self._gate: Gate | None = None
        self._held: HeldParameters | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_prefix", "_names", "_gate", "_held")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    def is_distributed(self) -> bool:
        """Whether this rank shares with others."""
        rank, size = place_in(self.process_set)
        return rank >= 0 and size > 1

    @property
    def prefix(self) -> str:
        """What stands before the names of gradients, by which codecs and gates keep what they hold back.

        Optimizers are counted at their first steps: they may be made before `init`.
        """
        if self._prefix is None and self.is_distributed:
            coded = (self._codec or engine.setting("compression") or "none") != "none"
            self._prefix = own_prefix(self.process_set, self._own) if coded or self._gate_rule is not None else ""
        return self._prefix or ""

    @property
    def held(self) -> HeldParameters | None:
        """What the servers hold; None under models that reduce gradients, and on a rank that shares nothing."""
        if self._held is None and self.model.ahead and self.is_distributed:
            self._held = HeldParameters(
                arrays, gates, self.model, Average, self.process_set, self._codec, self._gate_rule, self._pull_gate
            )
        return self._held

    def reduce(self, gradients: Sequence[Gradient], rescale: float) -> None:
        """Has each gradient be the average of all ranks'. rescale: what the optimizer multiplies gradients by."""
        if self.model.ahead or not self.is_distributed:
            return
        options = Options(sync=self.model.declared, codec=self._codec)
        how = How(Average, 1 / self._predivide, self._predivide, self.process_set, options)
        if self._gate_rule is not None and self._gate is None:
            self._gate = Gate(gates, self._gate_rule, self._names, self.process_set)
        for name, gradient, weight, priority in gradients:
            dense = gradient if gradient.stype == "default" else gradient.tostype("default")
            empty = False
            if self._gate is not None:
                self._names[name] = name
                offered = self._gate.offer(name, dense, weight / rescale)
                dense, empty = (dense, True) if offered is None else (offered, False)
            compressed, context = self.compressor.compress(dense)
            reduce_(compressed, name, priority, how, empty)
            result = self.compressor.decompress(compressed, context)
            if result is not gradient:
                (result if gradient.stype == "default" else result.tostype(gradient.stype)).copyto(gradient)

    def clock(self) -> None:
        """Ends an iteration of the gate of gradients."""
        if self._gate is not None:
            self._gate.clock()

    def agree(self) -> None:
        """Under a model that lets ranks run ahead, gives all ranks the same parameters; every rank calls it."""
        if self.held is not None:
            self.held.agree()


def significance(gradients: Sequence[Gradient], rescale: float) -> float:
    """|g| / |w| over all parameters, L2, clipped to [0, 1]."""
    steps = (arrays.norm(g.gradient) * rescale for g in gradients)
    return sync.significance(steps, (arrays.norm(g.weight) for g in gradients))
