"""DistributedOptimizer: an optimizer that reduces gradients over all ranks before it steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TypeVar

import torch

from paceline.common.arguments import asked_of, check_passes, warn_of_momentum
from paceline.common.compression import CompressionArgument
from paceline.common.engine import engine
from paceline.common.operators import Adasum, Average
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.common.seat import seat
from paceline.common.significance import Significance
from paceline.common.sync import Model
from paceline.torch import _cross_barrier
from paceline.torch._adasum_optimizer import AdasumOptimizer
from paceline.torch._cross_barrier import CrossBarrierOptimizer
from paceline.torch._distributed import Distributed
from paceline.torch._grad_scaler import guard
from paceline.torch._held_optimizer import HeldOptimizer
from paceline.torch._reducing_optimizer import ReducingOptimizer
from paceline.torch._wait_free import WaitFreeOptimizer
from paceline.torch.compression import Compression

__all__ = ["DistributedOptimizer", "Distributed"]

guard()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: CompressionArgument = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    sync: Model | str | None = None,
    gate: Significance | None = None,
    pull_gate: Significance | None = None,
    wait_free: bool = False,
    cross_barrier: bool = False,
    gradients_in_arena: bool = False,
) -> Distributed:
    """Wraps an optimizer so that gradients are reduced over all ranks before it steps.

    Reductions start while backward runs, gradient by gradient, with the highest priority for the first layers. The
    result's class is derived from the optimizer's; it has the optimizer's options and state.

    named_parameters: model.named_parameters(); without it parameters are named by their positions.
    compression: hvd.Compression.fp16 or a Compressor of your own, which work on tensors, or a codec of the engine, such
        as hvd.Compression.topk(0.01), "int8" or hvd.Compression.auto(). Default: PACELINE_COMPRESSION, else none.
    backward_passes_per_step: the number of passes whose gradients add up before they are reduced.
    op: Average, Sum, or Adasum, which combines the ranks' steps instead of their gradients.
    gradient_predivide_factor f: with Average, gradients are multiplied by 1/f before the sum and by f/size after it.
    groups: number of groups, or lists of parameters, that are reduced together. num_groups: deprecated, as a number.
    sparse_as_dense: reduce sparse gradients as dense ones. Otherwise their indices and values are gathered.
    process_set: the ranks that share their gradients.
    sync: the synchronisation model, such as paceline.SSP(3) or "ssp:3". Default: PACELINE_SYNC, else BSP. Under a model
        that lets ranks run ahead, the servers hold the parameters and each rank steps with its own gradients: the
        servers add the change, divided by the number of ranks for Average, and the rank continues with the sum of all
        ranks' changes.
    gate: paceline.Significance(...): a rank sends only significant changes; the others add up on it until they are.
    pull_gate: the same for pulls, under a model that lets ranks run ahead: a rank keeps the parameters that it read
        last, and is sent nothing, as long as all ranks' steps have changed less than that share of them.
    wait_free: under a model that lets ranks run ahead, step and exchange each parameter as soon as backward has
        computed its gradient, instead of in `step`; parameters change in `step` nevertheless. Changes of gradients or
        options after backward come too late for that `step`: clipping, GradScaler's unscaling, a scheduler. Each
        backward, or each backward_passes_per_step of them, needs a `step`. The optimizer must step each parameter
        independently, as SGD and Adam do. Under BSP and drop-stragglers gradients are always reduced while backward
        runs.
    cross_barrier: `step` does not wait. The next forward pass waits for each layer's parameters alone, and steps them
        with the options of the time of `step`; the results are the same. `step` takes the gradients: they are None
        after it. state_dict() of the model and of the optimizer, and model.parameters(), wait; `agree` waits for
        everything, before parameters are used or changed otherwise, such as by `model.layer.weight`. The optimizer must
        step each parameter independently.
    gradients_in_arena: gradients lie in memory that the servers of this host have mapped, and are summed in place: what
        backward has computed is copied there, and nothing else is. It gains where servers are on this host. No
        gradient does where nothing is reduced in place: in elastic jobs, with compression or a gate, on other devices.

    Raises ValueError for missing or duplicate names, for wrong groups, for an optimizer that is wrapped already, for
    gradient_predivide_factor without op=Average, for a model that cannot run, for wait_free or cross_barrier with a
    model or an optimizer that needs all gradients at once; NotImplementedError for Adasum within a process set.
    """
    if isinstance(optimizer, Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    check_passes(backward_passes_per_step)
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    model, compressor, codec = asked_of(
        compression, process_set, sync, gate, pull_gate, op=op, predivide=gradient_predivide_factor
    )
    warn_of_momentum(codec, lambda: any(group.get("momentum") for group in optimizer.param_groups))
    if cross_barrier:
        _check_cross_barrier(model, optimizer, op)
    if model.ahead:
        held = optimizer, named_parameters, model, op, process_set, codec, gate, pull_gate
        if not wait_free:
            return _derived(HeldOptimizer, optimizer)(*held)
        _check_wait_free(model, optimizer)
        early = _derived(WaitFreeOptimizer, optimizer)
        return early(*held, backward_passes_per_step=backward_passes_per_step)
    if op == Adasum and not model.whole:
        raise ValueError(f"sync={model.setting}: Adasum needs every rank's step")
    if op == Adasum and (engine.size() > 1 or seat.elastic):
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum runs over all ranks: it takes no process set")
        adasum = _derived(AdasumOptimizer, optimizer)
        return adasum(optimizer, named_parameters, compressor, backward_passes_per_step)
    kind: type[ReducingOptimizer] = CrossBarrierOptimizer if cross_barrier else ReducingOptimizer
    return _derived(kind, optimizer)(
        optimizer,
        named_parameters,
        compressor,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
        model.declared,
        codec,
        gate,
        gradients_in_arena,
    )


_Kind = TypeVar("_Kind", bound=Distributed)


def _derived(kind: type[_Kind], optimizer: torch.optim.Optimizer) -> type[_Kind]:
    """A class of the kind and of the wrapped optimizer's class, with the latter's name.

    It does not call the wrapped optimizer's constructor, whose arguments are not known here.
    """
    return type(type(optimizer).__name__, (kind, type(optimizer)), {"__module__": __name__})


def _check_wait_free(model: Model, optimizer: torch.optim.Optimizer) -> None:
    if model.has_supersteps or model.asks_significance:
        why = "where a superstep ends" if model.has_supersteps else "how significant all gradients are together"
        raise ValueError(
            f"wait_free with sync={model.setting}: {why} is known only after backward; use another model, such as "
            "SSP, or wait_free=False"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("wait_free with LBFGS, which steps all parameters at once: use wait_free=False")


def _check_cross_barrier(model: Model, optimizer: torch.optim.Optimizer, op: int) -> None:
    if model.ahead:
        raise ValueError(
            f"cross_barrier with sync={model.setting}, under which the servers hold the parameters and `step` reads "
            "them: use cross_barrier=False"
        )
    if op == Adasum:
        raise ValueError("cross_barrier with op=Adasum, which combines the ranks' steps: use cross_barrier=False")
    _cross_barrier.check(optimizer)
