"""DistributedOptimizer for Keras."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from paceline.common import compression as codecs
from paceline.common.arguments import asked_of, check_passes, warn_of_momentum
from paceline.common.codec_tuning import resolved
from paceline.common.operators import Average
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.common.significance import Significance
from paceline.tensorflow._held import Holding
from paceline.tensorflow._variables import given_to, has_momentum
from paceline.tensorflow.compression import Compression
from paceline.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from paceline.tensorflow.gradients import Reduction, groups_of, local_variables
from paceline.tensorflow.keras._version import KERAS_3, OPTIMIZERS, VERSION, build, keras, unusable, variables_of


class Distributed:
    """Stands before the wrapped optimizer's class. Its kinds override what applies gradients in their Keras."""

    _paceline_reduction: Reduction
    _paceline_holding: Holding | None
    _paceline_passes: LocalGradientAggregationHelper | None
    _paceline_auto: codecs.Auto | None  # a codec to measure
    _paceline_applies = 0  # the thread in which it does

    def agree(self) -> None:
        """Gives all ranks the same parameters: the sum of all their changes. Every rank calls it, after training.

        Where ranks may not run ahead they have the same parameters already.
        """
        if self._paceline_holding is not None:
            self._paceline_holding.agree(getattr(self, "_trainable_variables", None))  # Keras 3's

    def register_local_var(self, var: Any) -> None:
        """Leaves a variable's gradient to this rank: one of Keras, or the one of TensorFlow that it wraps.

        Raises ValueError under a synchronisation model that lets ranks run ahead.
        """
        if self._paceline_holding is not None:
            raise ValueError(
                "ranks that run ahead share all parameters: no variable is one rank's, or sync=paceline.BSP()"
            )
        self._paceline_reduction.local_variables.append(var)

    def _paceline_apply(
        self, grads: Sequence[Any], variables: Sequence[Any], apply: Callable[[Any], Any], optimizer: Any
    ) -> Any:
        """Reduces the gradients over all ranks, and applies them.

        optimizer: this one, or a LossScaleOptimizer around it, whose `apply` calls this one's for reduced gradients.
        """
        if self._paceline_applies == threading.get_ident():
            return apply(grads)
        self._paceline_applies = threading.get_ident()
        try:
            return self._paceline_reduce_and_apply(grads, variables, apply, optimizer)
        finally:
            self._paceline_applies = 0

    def _paceline_reduce_and_apply(
        self, grads: Sequence[Any], variables: Sequence[Any], apply: Callable[[Any], Any], optimizer: Any
    ) -> Any:
        holding = self._paceline_holding
        if self._paceline_auto is not None:
            self._paceline_measure(self._paceline_auto, variables)
        if holding is not None:
            build(optimizer, variables)
            step, apply = apply, lambda given: holding.apply(given, variables, step)
        if self._paceline_passes is None:
            if holding is None:
                grads = self._paceline_reduction(grads, variables)
                if hasattr(optimizer, "inner_optimizer"):
                    grads = self._paceline_reduction.not_finite_together(grads, variables)
            return apply(grads)
        build(optimizer, variables)  # here, because a branch of tf.cond makes no variables
        reduced = self._paceline_passes.compute_gradients(grads, variables)
        return self._paceline_passes.apply_gradients(lambda: apply(reduced), optimizer)

    def _paceline_measure(self, auto: codecs.Auto, variables: Sequence[Any]) -> None:
        """Chooses the codec by measurement, with the first step, which all ranks make."""
        process_set, self._paceline_auto = self._paceline_reduction.process_set, None
        if process_set.included():
            values = [tf.convert_to_tensor(v) for v in variables]
            text = resolved(auto, [v.shape.num_elements() * v.dtype.size for v in values], process_set)
            if self._paceline_holding is not None:
                self._paceline_holding.set_codec(text)
            else:
                self._paceline_reduction.compression = codecs.Codec(text or "none")


class _CallableList(list[Any]):
    """Variables for scripts of both kinds: `optimizer.variables`, and `optimizer.variables()`, as in Horovod."""

    def __call__(self) -> _CallableList:
        return self


class _OfKeras3(Distributed):
    @property
    def variables(self) -> _CallableList:
        """The optimizer's variables."""
        return _CallableList(super().variables)  # type: ignore[misc]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Reduces the gradients over all ranks, and applies them."""
        return _apply_3(self, self, super().apply, grads, trainable_variables)  # type: ignore[misc]


def _apply_3(
    distributed: Any, optimizer: Any, apply: Callable[..., Any], grads: Sequence[Any], trainable_variables: Any = None
) -> Any:
    known = list(distributed._trainable_variables if trainable_variables is None else trainable_variables)
    return distributed._paceline_apply(grads, known, lambda reduced: apply(reduced, trainable_variables), optimizer)


class _OfKeras2(Distributed):
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        """Reduces the gradients over all ranks, and applies them."""
        return _apply_2(self, self, super().apply_gradients, grads_and_vars, *args, **kwargs)  # type: ignore[misc]


def _apply_2(
    distributed: Distributed, optimizer: Any, apply: Callable[..., Any], grads_and_vars: Iterable[tuple[Any, Any]],
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    pairs = list(grads_and_vars)
    grads, variables = [g for g, _ in pairs], [v for _, v in pairs]

    def step(reduced: Any) -> Any:
        return apply(list(zip(reduced, variables, strict=True)), *args, **kwargs)

    return distributed._paceline_apply(grads, variables, step, optimizer)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    sync: Any = None,
    gate: Significance | None = None,
    pull_gate: Significance | None = None,
) -> Any:
    """Wraps a Keras optimizer so that gradients are reduced over all ranks before they are applied.

    The result is an optimizer of the same class and configuration, and with the same state if it has one already.
    Models that are compiled with it do not use XLA, which has no such operations, unless compile is told
    jit_compile=True.

    backward_passes_per_step: the number of passes whose gradients add up before they are reduced; divided by it with
    average_aggregated_gradients. `iterations` counts passes. The other arguments are those of
    `paceline.tensorflow.DistributedGradientTape`, and:

    sync: the synchronisation model, such as paceline.SSP(3) or "ssp:3". Default: PACELINE_SYNC, else BSP. Under a model
        that lets ranks run ahead, the servers hold the parameters and each rank steps with its own gradients: the
        servers add the change, divided by the number of ranks for Average, and the rank continues with the sum of all
        ranks' changes. At the end `agree()` of the optimizer gives all ranks the same parameters.
    compression: also hvd.Compression.auto(), which measures with the first step; not in an elastic job.
    pull_gate: a gate for pulls, under such a model: a rank keeps the parameters that it read last, and is sent nothing,
        as long as all ranks' steps have changed less than that share of them.

    Raises ValueError for what is no optimizer of Keras or wrapped already, and for arguments that do not go together.
    """
    if given_to(optimizer, "_paceline_reduction") is not None:
        raise ValueError("the optimizer is a DistributedOptimizer already")
    kind = type(optimizer)
    if not isinstance(optimizer, OPTIMIZERS):
        raise ValueError(f"expected an optimizer of Keras {VERSION}, got {kind.__module__}.{kind.__name__}")
    check_passes(backward_passes_per_step)
    model, _, codec = asked_of(
        compression, process_set, sync, gate, pull_gate, op=op, predivide=gradient_predivide_factor
    )
    warn_of_momentum(codec, lambda: has_momentum(optimizer))
    auto = codec if isinstance(codec, codecs.Auto) else None
    if auto is not None:
        compression, codec = Compression.none, None
    holding: Holding | None = None
    if model.ahead:
        holding = Holding(model, op, process_set, None if codec is None else codec.text, gate, pull_gate)
        reduction = Reduction(sync="bsp", process_set=process_set)  # what no rank does
    else:
        reduction = Reduction(
            compression, sparse_as_dense, op, gradient_predivide_factor, groups_of(num_groups, groups), process_set,
            sync, scale_local_gradients, gate,
        )  # fmt: skip
    wrapped = _wrapped_3(optimizer, name) if KERAS_3 else _wrapped_2(optimizer, name)
    wrapped._paceline_reduction = reduction
    wrapped._paceline_holding = holding
    wrapped._paceline_auto = auto
    wrapped._paceline_passes = None
    if backward_passes_per_step != 1:
        wrapped._paceline_passes = LocalGradientAggregationHelper(
            backward_passes_per_step,
            reduction if holding is None else lambda grads, _: grads,
            sparse_as_dense or holding is not None,
            average_aggregated_gradients,
        )
    return wrapped


def _derived(base: type, kind: type) -> Any:
    return type(kind.__name__, (base, kind), {"__module__": kind.__module__})


def _wrapped_3(optimizer: Any, name: str | None) -> Any:
    """An optimizer of Keras 3: its trackers belong to the object, so there is another one, with the same state."""
    wrapped = _copied(optimizer, _derived(_OfKeras3, type(optimizer)), {"name": name} if name else {})
    if optimizer.built:
        wrapped.build(optimizer._trainable_variables)
        for to, value in zip(variables_of(wrapped), variables_of(optimizer), strict=True):
            to.assign(value)
    return wrapped


def _copied(optimizer: Any, kind: Any, options: dict[str, Any]) -> Any:
    """Another optimizer with the same configuration, and what `exclude_from_weight_decay` has set."""
    inner = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None
    try:
        made = kind.from_config(optimizer.get_config() | options)
    except Exception:
        made = _copied_with_objects(optimizer, kind, options, inner)
    if inner is not None:
        _copy_exclusions(made.inner_optimizer, inner)
    _copy_exclusions(made, optimizer)
    return made


def _copied_with_objects(optimizer: Any, kind: Any, options: dict[str, Any], inner: Any) -> Any:
    """Hands schedules, functions and the optimizer within it on as objects.

    A program's own need not have a configuration, or be known to Keras.
    """
    own, objects = vars(optimizer), {}
    if callable(own.get("_learning_rate")):
        objects["_learning_rate"], own["_learning_rate"] = own["_learning_rate"], tf.constant(0.0)
    if inner is not None:
        objects["inner_optimizer"], own["inner_optimizer"] = inner, keras.optimizers.SGD()
    try:
        config = optimizer.get_config() | options
    finally:
        own.update(objects)
    if "_learning_rate" in objects and "learning_rate" in config:
        config["learning_rate"] = objects["_learning_rate"]
    if inner is None:
        return kind.from_config(config)
    config.pop("inner_optimizer")
    return kind(_copied(inner, type(inner), {}), **config)


def _copy_exclusions(to: Any, optimizer: Any) -> None:
    """What `exclude_from_weight_decay` has set, which is no part of a configuration."""
    for attribute, value in vars(optimizer).items():
        if attribute.startswith("_exclude_from_weight_decay"):
            setattr(to, attribute, copy.copy(value))


def _wrapped_2(optimizer: Any, name: str | None) -> Any:
    """An optimizer of Keras 2, which shares its state with the given one."""
    derived = _derived(_OfKeras2, type(optimizer))
    wrapped = object.__new__(derived)
    wrapped.__dict__.update(optimizer.__dict__)
    if name:
        wrapped._name = name
    return wrapped


def PartialDistributedOptimizer(optimizer: Any, *args: Any, local_layers: Any = None, **options: Any) -> Any:
    """DistributedOptimizer that leaves the gradients of `local_layers`' variables to this rank.

    local_layers: a layer, or layers, that are built. Raises what `DistributedOptimizer` raises, and ValueError under a
    synchronisation model that lets ranks run ahead.
    """
    wrapped = DistributedOptimizer(optimizer, *args, **options)
    if wrapped._paceline_holding is not None:
        raise ValueError("ranks that run ahead share all parameters: give no local_layers, or sync=paceline.BSP()")
    wrapped._paceline_reduction.local_variables.extend(local_variables(local_layers))
    return wrapped


def _keep_from_xla() -> None:
    """Keras 3's choice for jit_compile="auto": not with a DistributedOptimizer. Keras 2 compiles only when told so."""
    from keras.src.trainers import trainer

    supports = trainer.model_supports_jit

    def supports_jit(model: Any) -> bool:
        return given_to(getattr(model, "optimizer", None), "_paceline_reduction") is None and supports(model)

    trainer.model_supports_jit = supports_jit


def _reduce_before_losses_are_scaled_back() -> None:
    """Has a LossScaleOptimizer around a DistributedOptimizer see the gradients of all ranks, not its own.

    Else a rank whose own gradients are not finite would skip a reduction that the others wait for. Keras wraps an
    optimizer so where a model with the policy mixed_float16 is compiled.
    """
    if KERAS_3:
        kind = keras.optimizers.LossScaleOptimizer
        kind.apply = _reducing_before(kind.apply, _apply_3)
        return
    for kind in keras.mixed_precision.LossScaleOptimizer.__subclasses__():
        kind.apply_gradients = _reducing_before(kind.apply_gradients, _apply_2)


def _reducing_before(apply: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def reducing(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner_optimizer
        if not isinstance(inner, Distributed):
            return apply(self, *args, **kwargs)
        return run(inner, self, functools.partial(apply, self), *args, **kwargs)

    return reducing


try:  # what Keras keeps to itself
    _reduce_before_losses_are_scaled_back()
    if KERAS_3:
        _keep_from_xla()
except (ImportError, AttributeError) as e:
    raise unusable(e) from e
