"""Gradients of all ranks: what the tape and the optimizers do alike, and the tape."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from paceline.common import compression as codecs
from paceline.common.arguments import asked_of
from paceline.common.engine import engine
from paceline.common.operation import How, Options
from paceline.common.operators import Average, Min, Sum
from paceline.common.process_sets import ProcessSet, global_process_set, place_in, process_set_number
from paceline.common.significance import Significance
from paceline.common.util import split_list
from paceline.tensorflow._gate import gate_of
from paceline.tensorflow._glue import asynchronous
from paceline.tensorflow._variables import label_of
from paceline.tensorflow.compression import Compression
from paceline.tensorflow.mpi_ops import allreduce, exchange_changes, in_turn, name_of_use, reduce_dense, reduce_sparse

# By round of the engine, process set and label.
_numbers: collections.Counter[tuple[int, int, str]] = collections.Counter()


def _name_of(variable: Any, among: int, group: int = 1, alone: bool = False) -> str | None:
    """The name of a variable's gradient on all ranks, which is the same in each step. None for what has no identity.

    among: the process set. group: how many gradients are reduced together, of which this is the first. Each call is one
    more use in a graph, which `name_of_use` counts. Variables of one label are numbered in the order in which their
    gradients are first reduced in a job, among these ranks, so that a rank that joins later, with fewer models behind
    it, has the same numbers. Other labels do not count: functions that were traced before are not traced again.
    """
    numbers = getattr(variable, "_paceline_numbers", None)
    if numbers is None:
        try:
            numbers = variable._paceline_numbers = {}
        except AttributeError:
            return None
    of, number = numbers.get(among, (None, 0))
    label = label_of(variable)
    if of != engine.round:
        number = _numbers[engine.round, among, label]
        numbers[among] = engine.round, number
        _numbers[engine.round, among, label] += 1
    name = f"gradient.{number}.{label}"
    return name_of_use(name if group == 1 else f"{name}.group{group}", among, alone)


def ranks_of_averages(process_set: ProcessSet) -> Any:
    """The number of ranks by which averages divide: in an elastic job those that are left in this step."""
    if not engine.setting("elastic"):
        return process_set.size() or 1
    return allreduce(tf.ones([]), op=Sum, process_set=process_set)


def _divided(grad: Any, by: Any) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(grad.values, by), grad.indices, grad.dense_shape)
    return grad / tf.cast(by, grad.dtype)


def _values(grad: Any) -> Any:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


@dataclasses.dataclass
class Reduction:
    """How gradients are reduced. Raises ValueError for arguments that do not fit together."""

    compression: Any = Compression.none
    sparse_as_dense: bool = False
    op: int = Average
    gradient_predivide_factor: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet = global_process_set
    sync: Any = None
    scale_local_gradients: bool = True
    gate: Significance | None = None
    local_variables: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        factor = self.gradient_predivide_factor
        model, _, codec = asked_of(
            self.compression, self.process_set, self.sync, self.gate, op=self.op, predivide=factor, measures=False
        )
        _check_groups(self.groups)
        if isinstance(codec, codecs.Auto):
            raise ValueError("Compression.auto() is DistributedOptimizer's, of Keras: it measures with the first step")
        if model.ahead:
            raise ValueError(
                f"sync={model.setting}: ranks that run ahead exchange parameters, which a tape and optimizers of "
                "TensorFlow 1 do not change: wrap an optimizer of Keras by hvd.DistributedOptimizer"
            )
        self._sync = model.declared

    def __call__(self, grads: Sequence[Any], variables: Sequence[Any], generic: bool = False) -> list[Any]:
        """The gradients of all ranks, in the place of this rank's; None stays.

        generic: a gradient's name is its place, so that it meets those of other functions and branches on other ranks.
        A rank that is not in the process set keeps its own.
        """
        among = process_set_number(self.process_set)
        if place_in(self.process_set)[0] < 0:
            return list(grads)

        def name_of(i: int, group: int = 1) -> str | None:
            return f"grad_{i}" if generic else _name_of(variables[i], among, group)

        reduced = list(grads)
        dense: list[int] = []
        before: list[Any] = []
        scales = self.scale_local_gradients and self.op == Average
        scales &= any(g is not None and self.is_local(v) for g, v in zip(grads, variables, strict=True))
        ranks = ranks_of_averages(self.process_set) if scales else 1
        for i, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if grad is None:
                continue
            if self.is_local(variable):
                reduced[i] = _divided(grad, ranks)
            elif isinstance(grad, tf.IndexedSlices) and not self.sparse_as_dense:
                if self.gate is not None:
                    raise ValueError("gate= is for dense gradients: give sparse_as_dense=True")
                with tf.control_dependencies(before):
                    reduced[i] = reduce_sparse(grad, name_of(i), self._how(), self.compression)
                before = in_turn(reduced[i])
            else:
                dense.append(i)
        for group in self._groups(dense, variables):
            values = [tf.convert_to_tensor(reduced[i]) for i in group]
            with tf.control_dependencies(before):
                if self.gate is None:
                    results = reduce_dense(values, name_of(group[0], len(group)), self._how(), self.compression)
                else:
                    names = [str(name_of(i)) for i in group]
                    results = self._gated(self.gate, values, [variables[i] for i in group], names)
            before = in_turn(results[0])
            for i, value in zip(group, results, strict=True):
                reduced[i] = value
        return reduced

    def not_finite_together(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Has gradients that are left to a rank be not finite where some rank's are not: ranks skip the same steps."""
        result = list(grads)
        pairs = enumerate(zip(grads, variables, strict=True))
        local = [i for i, (g, v) in pairs if g is not None and self.is_local(v)]
        if not local or place_in(self.process_set)[0] < 0:
            return result
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(_values(grads[i]))) for i in local])
        everywhere = allreduce(tf.cast(finite, tf.float32), op=Min, process_set=self.process_set)
        for i in local:
            result[i] = _divided(grads[i], everywhere)
        return result

    def is_local(self, variable: Any) -> bool:
        """Whether a variable's gradient is left to this rank. One of Keras 3 wraps one of TensorFlow."""
        wrapped = getattr(variable, "value", None)
        return any(v is variable or v is wrapped for v in self.local_variables)

    def _gated(
        self, rule: Significance, values: list[tf.Tensor], variables: list[Any], names: list[str]
    ) -> list[tf.Tensor]:
        """Reduces what is significant of the gradients, together with what was withheld before."""
        how = self._how()
        number = process_set_number(self.process_set)
        # TensorFlow traces a function twice where that makes variables, so that gates are numbered in it alone.
        known = [_name_of(v, number, alone=True) for v in variables]
        gates = [gate_of(v, n, rule, number, g) for v, n, g in zip(variables, known, values, strict=True)]
        offered = [g.offer(value, v) for g, value, v in zip(gates, values, variables, strict=True)]
        empty = tf.cast(tf.stack([small for _, small in offered]), tf.uint8)
        compressor, _ = codecs.split(self.compression)
        given = [compressor.compress(total) for total, _ in offered]
        reduced = exchange_changes([t for t, _ in given], names, how, empty)
        return [compressor.decompress(t, ctx) for t, (_, ctx) in zip(reduced, given, strict=True)]

    def _how(self) -> How:
        factor = self.gradient_predivide_factor
        options = Options(sync=self._sync, codec=getattr(codecs.codec_of(self.compression), "text", None))
        return How(self.op, 1.0 / factor, factor, self.process_set, options)

    def _groups(self, dense: list[int], variables: Sequence[Any]) -> Iterable[list[int]]:
        """Places of gradients that are reduced together. By default each is alone where it can start early."""
        if isinstance(self.groups, int) and self.groups > 0:
            return [g for g in split_list(dense, self.groups) if g]
        if isinstance(self.groups, Sequence):
            place = {id(variables[i]): i for i in dense}
            groups = [[place[id(v)] for v in group if id(v) in place] for group in self.groups]
            rest = set(dense) - {i for group in groups for i in group}
            return [g for g in groups if g] + [[i] for i in sorted(rest)]
        if asynchronous and not tf.executing_eagerly():
            return [[i] for i in dense]
        return [dense] if dense else []


def groups_of(num_groups: int, groups: Any) -> Any:
    """The groups that two arguments name, of which num_groups is deprecated."""
    return groups if groups is not None else num_groups or None


def _check_groups(groups: Any) -> None:
    if groups is None or (isinstance(groups, int) and groups > 0):
        return
    if not _is_list(groups) or not all(map(_is_list, groups)):
        raise ValueError(f"groups={groups!r}: groups must be a positive number or a list of lists of variables")
    members = [id(v) for group in groups for v in group]
    if not all(hasattr(v, "dtype") for group in groups for v in group):
        raise ValueError("groups must consist of variables")
    if len(set(members)) != len(members):
        raise ValueError("a variable can appear only once in groups")


def _is_list(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)


class _DistributedTape:
    """Stands before the wrapped tape's class."""

    _reduction: Reduction
    _local = False  # while TensorFlow asks for the rows of a Jacobian, in a loop whose passes run at the same time

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **options: Any,
    ) -> Any:
        """The gradients of all ranks, of the sources' structure.

        use_generic_names: gradients match by their places among the sources, whichever function or branch of a tf.cond
            a rank computes them in. A function then has one such call, or orders them by tf.control_dependencies.
        """
        grads = super().gradient(target, sources, output_gradients, **options)  # type: ignore[misc]
        return grads if self._local else self._reduced(grads, sources, use_generic_names)

    def jacobian(self, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
        """The Jacobians of all ranks, of the sources' structure, which are reduced as gradients are."""
        return self._reduced(self._of_this_rank("jacobian", target, sources, *args, **options), sources)

    def batch_jacobian(self, target: Any, source: Any, *args: Any, **options: Any) -> Any:
        """The Jacobian of each row for all ranks, which is reduced as a gradient is."""
        return self._reduced(self._of_this_rank("batch_jacobian", target, source, *args, **options), source)

    def _of_this_rank(self, method: str, *args: Any, **options: Any) -> Any:
        self._local = True
        try:
            return getattr(super(), method)(*args, **options)
        finally:
            self._local = False

    def _reduced(self, grads: Any, sources: Any, generic: bool = False) -> Any:
        reduced = self._reduction(tf.nest.flatten(grads), tf.nest.flatten(sources), generic)
        return tf.nest.pack_sequence_as(grads, reduced)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Pairs of a source and its gradient: those that are left to this rank, and those of all ranks."""
        grads = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs: tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]] = ([], [])
        for source, grad in zip(sources, grads, strict=True):
            pairs[not self._reduction.is_local(source)].append((source, grad))
        return pairs

    def register_local_source(self, source: Any) -> None:
        """Leaves a variable's gradient to this rank."""
        self._reduction.local_variables.append(source)


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    sync: Any = None,
    gate: Significance | None = None,
) -> Any:
    """Wraps a tape so that its `gradient` returns the gradients of all ranks.

    In tf.function each gradient is reduced as soon as backward has computed it.

    compression: hvd.Compression.fp16 or a Compressor of your own, which work on tensors, or a codec of the engine, such
        as hvd.Compression.topk(0.01) or "int8". Default: PACELINE_COMPRESSION, else none.
    sparse_as_dense: reduce tf.IndexedSlices as dense tensors. Otherwise their indices and values are gathered.
    gradient_predivide_factor f: with Average, gradients are multiplied by 1/f before the sum and by f/size after it.
    groups: number of groups, or lists of variables, that are reduced together. num_groups: deprecated, as a number.
    process_set: the ranks that take part; the others keep their own gradients.
    scale_local_gradients: divide the gradients of variables that `register_local_source` names by the number of ranks.
    sync: a synchronisation model that reduces gradients, such as paceline.DropStragglers(3). Default: PACELINE_SYNC.
    gate: paceline.Significance(...): a rank sends only significant gradients; the others add up on it until they are.
        The sources are variables. What is withheld is part of paceline.compression_state().
    device_dense, device_sparse: Horovod's, without effect.

    Raises ValueError for what is no tape, for wrong groups, for gradient_predivide_factor without op=Average, for a
    model that lets ranks run ahead and for a gate that cannot be used. `gradient` raises what `allreduce` raises, and
    ValueError for sparse gradients with a gate.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise ValueError(f"DistributedGradientTape wraps a tf.GradientTape, not {type(gradtape).__name__}")
    if isinstance(gradtape, _DistributedTape):
        raise ValueError("the tape is a DistributedGradientTape already, whose gradients would be reduced twice")
    reduction = Reduction(
        compression, sparse_as_dense, op, gradient_predivide_factor, groups_of(num_groups, groups), process_set, sync,
        scale_local_gradients, gate,
    )  # fmt: skip
    kind = type(gradtape)
    tape: Any = object.__new__(type(kind.__name__, (_DistributedTape, kind), {"__module__": __name__}))
    tape.__dict__.update(gradtape.__dict__)
    tape._reduction = reduction
    return tape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """DistributedGradientTape that leaves the gradients of `local_layers`' variables to this rank.

    local_layers: a layer, or layers, that are built. Raises what `DistributedGradientTape` raises.
    """
    tape = DistributedGradientTape(gradtape, *args, **options)
    for variable in local_variables(local_layers):
        tape.register_local_source(variable)
    return tape


def local_variables(layers: Any) -> list[Any]:
    """The trainable variables of a layer or of layers, which are built."""
    layers = [] if layers is None else layers if isinstance(layers, (list, tuple, set)) else [layers]
    found = [v for layer in layers for v in layer.trainable_weights]
    # A variable of Keras 3 is a wrapper of TensorFlow's; tapes get either.
    return found + [v.value for v in found if isinstance(getattr(v, "value", None), tf.Variable)]


def alone(process_set: ProcessSet) -> bool:
    """Whether this rank is the only one of the set."""
    return engine.is_initialized() and process_set.size() == 1
