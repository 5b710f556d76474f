"""DistributedOptimizer: an optimizer that reduces gradients over all ranks before it steps."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from paceline import compression as codecs
from paceline._engine import engine
from paceline._operation import Options
from paceline.common.operators import Adasum, Average, Sum
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.significance import Significance
from paceline.sync import Model, check, model_of
from paceline.torch._codec_tuning import resolved
from paceline.torch._gate import Gate
from paceline.torch._gradient_hooks import GradientHooks
from paceline.torch._handles import synchronize
from paceline.torch._held_optimizer import HeldOptimizer
from paceline.torch._ops_async import reduction, sparse_allreduce_async, start_group, start_one
from paceline.torch._wait_free import WaitFreeOptimizer
from paceline.torch.compression import Compression


class _DistributedOptimizer(GradientHooks):
    """Reduces gradients as backward computes them, and waits for them in `step`."""

    def __init__(
        self,
        optimizer,
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
        sync=None,
        codec=None,
        gate=None,
    ):
        self._adopt(optimizer, named_parameters, compression, backward_passes_per_step)
        self._gate = None if gate is None else Gate(gate, self._parameter_names, process_set)
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._synchronized = False
        self._should_synchronize = True
        self._sparse: set[torch.Tensor] = set()  # parameters that have had sparse gradients
        self._group_of: dict[torch.Tensor, list[torch.Tensor]] = {}
        self._ready: set[torch.Tensor] = set()  # parameters that wait for the rest of their group
        for group in _groups(groups, [p for g in self.param_groups for p in g["params"] if p.requires_grad]):
            self._group_of.update(dict.fromkeys(group, group))
        self._distributed = process_set.included() and engine.size() > 1
        if self._distributed:
            self._options = Options(sync=sync, codec=resolved(codec, self.param_groups, process_set))
            self._watch_all()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters; their gradients are reduced too."""
        super().add_param_group(param_group)
        number, group = len(self.param_groups) - 1, self.param_groups[-1]["params"]
        for place, p in enumerate(group):
            self._parameter_names.setdefault(p, f"noname.{number}.{place}")
        if self._distributed:
            self._watch(group)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads options and state; drops reductions in flight."""
        self._in_flight.clear()
        self._ready.clear()
        self._synchronized = False
        self._should_synchronize = True
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        super().load_state_dict(*args, **kwargs)

    def _reduce(self, p: torch.Tensor) -> None:
        group = self._group_of.get(p, [p])
        self._ready.add(p)
        if self._ready.issuperset(group):
            self._start(group)

    def _start(self, params: Sequence[torch.Tensor]) -> None:
        """Starts the reductions of these parameters' gradients together."""
        self._ready.difference_update(params)
        dense = []
        for p in params:
            if p.grad is None:  # another rank may have a gradient, so this one contributes zeros
                p.grad = _empty_sparse(p) if p in self._sparse else torch.zeros_like(p)
            if p.grad.is_sparse:
                self._sparse.add(p)
            if p.grad.is_sparse and not self.sparse_as_dense:
                self._start_sparse(p)
            else:
                dense.append(p)
        if dense:
            self._start_dense(dense)

    def _start_dense(self, params: Sequence[torch.Tensor]) -> None:
        before = 1.0 / self.gradient_predivide_factor if self.op == Average else 1.0
        after = self.gradient_predivide_factor if self.op == Average else 1.0
        parts, contexts = [], []
        for p in params:
            grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
            empty = False
            if self._gate is not None:
                offered = self._gate.offer(p, grad)
                grad, empty = (grad, True) if offered is None else (offered, False)
            compressed, context = self._compression.compress(grad)
            parts.append(
                reduction(
                    compressed,
                    True,
                    f"allreduce.{self._parameter_names[p]}",
                    self.op,
                    before,
                    after,
                    self.process_set,
                    self._priority[p],
                    self._options,
                    empty,
                )
            )
            contexts.append(context)
        if len(params) == 1:
            single = start_one(parts[0])
            self._in_flight[params[0]] = lambda: self._store(params[0], synchronize(single), contexts[0])
            return
        group = start_group(parts)

        def finish() -> None:
            for p, reduced, context in zip(params, synchronize(group), contexts, strict=True):
                self._store(p, reduced, context)

        self._in_flight.update({p: lambda: None for p in params[1:]} | {params[0]: finish})

    def _start_sparse(self, p: torch.Tensor) -> None:
        result = sparse_allreduce_async(p.grad, f"allreduce.{self._parameter_names[p]}", self.op, self.process_set)

        def finish() -> None:
            p.grad = result()

        self._in_flight[p] = finish

    def _store(self, p: torch.Tensor, reduced: torch.Tensor, context: Any) -> None:
        grad = self._compression.decompress(reduced, context)
        if p.grad.is_sparse:
            p.grad = grad.to_sparse(p.grad.sparse_dim())
        elif grad is not p.grad:
            p.grad.copy_(grad)

    def synchronize(self) -> None:
        """Waits until every gradient is reduced. Also reduces, as zeros, those that backward has not computed.

        Call it before using gradients, for example to clip them, and step within `skip_synchronize`.
        """
        missing = [p for p in self._passes_left if p not in self._in_flight]
        if missing:
            self._start(missing)
        self._finish_all()
        if self._gate is not None:
            self._gate.clock()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step` does not synchronize, because `synchronize` was called before."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the gradients and makes the wrapped optimizer's step.

        closure: computes the loss and its gradients, which are reduced each time that the optimizer calls it.
        """
        if not self._should_synchronize:
            self._synchronized = False
            return super().step(closure)
        if self._synchronized:
            warnings.warn(
                "optimizer.step() was called after optimizer.synchronize(): the gradients are reduced "
                "twice; use `with optimizer.skip_synchronize(): optimizer.step()`",
                stacklevel=2,
            )
        if closure is None:
            self.synchronize()
            self._synchronized = False
            return super().step()

        def reduced() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        try:
            return super().step(reduced)
        finally:
            self._synchronized = False

    step.hooked = True  # PyTorch calls step hooks around the wrapped optimizer's step, and only there


def _empty_sparse(p: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without elements, of whole rows, as embeddings have."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=p.device)
    return torch.sparse_coo_tensor(indices, p.new_empty(0, *p.shape[1:]), p.shape, check_invariants=False)


def _groups(groups: Any, params: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Lists of the parameters that are reduced together; a parameter in none of them is reduced alone."""
    if groups is None:
        return []
    if isinstance(groups, int) and groups > 0:
        share, over = divmod(len(params), groups)
        starts = [i * share + min(i, over) for i in range(groups + 1)]
        return [params[a:b] for a, b in itertools.pairwise(starts) if a < b]
    if not isinstance(groups, list):
        raise ValueError("groups must be a positive number or a list of lists of tensors")
    members = [p for group in groups for p in group]
    if not all(isinstance(p, torch.Tensor) for p in members):
        raise ValueError("groups must consist of tensors")
    if len(set(members)) != len(members):
        raise ValueError("a parameter can appear only once in groups")
    known = set(params)
    return [[p for p in group if p in known] for group in groups]


class _DistributedAdasumOptimizer(GradientHooks):
    """Steps each parameter with its own gradient and combines the steps of all ranks by Adasum.

    Adasum thus combines the changes that the wrapped optimizer makes, not the gradients. Parameters change in `step`,
    when all ranks' changes are combined.
    """

    def __init__(self, optimizer, named_parameters, compression, backward_passes_per_step):
        self._adopt(optimizer, named_parameters, compression, backward_passes_per_step)
        self._watch_all()

    def _reduce(self, p: torch.Tensor) -> None:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        compressed, context = self._compression.compress(self._stepped(p) - p.detach())
        handle = start_one(
            reduction(
                compressed,
                True,
                f"allreduce.{self._parameter_names[p]}",
                Adasum,
                1.0,
                1.0,
                global_process_set,
                self._priority[p],
            )
        )

        def finish() -> None:
            p.detach().add_(self._compression.decompress(synchronize(handle), context))

        self._in_flight[p] = finish

    def synchronize(self) -> None:
        """Does nothing: `step` combines the ranks' steps."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Raises AssertionError: there is no step without combining."""
        raise AssertionError("skip_synchronize() is not supported with op=hvd.Adasum")

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Combines the steps of all ranks and adds them to the parameters. Returns the closure's loss, if any."""
        loss = closure() if closure is not None else None
        for p in self._passes_left:
            if p not in self._in_flight:
                self._reduce(p)
        self._finish_all()
        return loss

    step.hooked = True


def DistributedOptimizer(
    optimizer,
    named_parameters=None,
    compression=Compression.none,
    backward_passes_per_step=1,
    op=Average,
    gradient_predivide_factor=1.0,
    num_groups=0,
    groups=None,
    sparse_as_dense=False,
    process_set: ProcessSet = global_process_set,
    sync=None,
    gate: Significance | None = None,
    pull_gate: Significance | None = None,
    wait_free: bool = False,
):
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

    Raises ValueError for missing or duplicate names, for wrong groups, for an optimizer that is wrapped already, for
    gradient_predivide_factor without op=Average, for a model that cannot run, for wait_free with a model or an
    optimizer that needs all gradients at once; NotImplementedError for Adasum within a process set.
    """
    if isinstance(optimizer, GradientHooks | HeldOptimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: at least 1")
    if not gradient_predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor}: a number above 0")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor works with op=hvd.Average only")
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if gate is not None and (not isinstance(gate, Significance) or op not in (Average, Sum)):
        raise ValueError(f"gate={gate!r}: give paceline.Significance(...), with op=Average or Sum")
    Significance.check("pull_gate", pull_gate)
    codec = codecs.codec_of(compression)
    free = compression is Compression.none and op != Adasum  # Adasum's steps are never coded
    if free and engine.is_initialized() and engine.setting("compression") == "auto":
        codec = codecs.codec_of("auto")
    if codec is not None:
        compression = Compression.none
        _check_codec(codec, optimizer, op)
    model = model_of(sync)
    if model.ahead:
        if op not in (Average, Sum) or gradient_predivide_factor != 1.0 or compression is not Compression.none:
            raise ValueError(
                f"sync={model.setting}: ranks exchange what their steps did, so that only op=Average or Sum, "
                "gradient_predivide_factor=1, Compression.none and the engine's codecs are possible"
            )
        kind = WaitFreeOptimizer if wait_free else HeldOptimizer
        passes = (backward_passes_per_step,) if wait_free else ()
        if wait_free:
            _check_wait_free(model, optimizer)
        cls = type(type(optimizer).__name__, (kind, type(optimizer)), {"__module__": __name__})
        return cls(optimizer, named_parameters, model, op, process_set, codec, gate, pull_gate, *passes)
    if pull_gate is not None:
        raise ValueError(
            f"pull_gate={pull_gate!r} with sync={model.setting}: each step needs its sums; give a model under which "
            "the servers hold the parameters, such as paceline.SSP(3)"
        )
    check(model, process_set.size(), accumulate=False)
    if op == Adasum and model.setting != "bsp":
        raise ValueError(f"sync={model.setting}: Adasum needs every rank's step")
    kind = _DistributedAdasumOptimizer if op == Adasum and engine.size() > 1 else _DistributedOptimizer
    # The class does not call the wrapped optimizer's constructor, whose arguments are not known here.
    cls = type(type(optimizer).__name__, (kind, type(optimizer)), {"__module__": __name__})
    if kind is _DistributedOptimizer:
        return cls(
            optimizer,
            named_parameters,
            compression,
            backward_passes_per_step,
            op,
            gradient_predivide_factor,
            groups,
            sparse_as_dense,
            process_set,
            model.declared,
            codec,
            gate,
        )
    if process_set.process_set_id != 0:
        raise NotImplementedError("Adasum runs over all ranks: it takes no process set")
    return cls(optimizer, named_parameters, compression, backward_passes_per_step)


def _check_wait_free(model: Model, optimizer: torch.optim.Optimizer) -> None:
    if model.has_supersteps or model.asks_significance:
        why = "where a superstep ends" if model.has_supersteps else "how significant all gradients are together"
        raise ValueError(
            f"wait_free with sync={model.setting}: {why} is known only after backward; use another model, such as "
            "SSP, or wait_free=False"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("wait_free with LBFGS, which steps all parameters at once: use wait_free=False")


def _check_codec(codec: codecs.Codec, optimizer: torch.optim.Optimizer, op: int) -> None:
    codecs.check(codec)
    if op == Adasum:
        raise ValueError(f"compression={codec.text!r}: Adasum combines whole steps, which travel plain")
    rules = engine.codec_info(codec.text)
    if rules and all(r["momentum"] for r in rules) and any(g.get("momentum") for g in optimizer.param_groups):
        name = rules[0]["setting"].partition(":")[0]
        warnings.warn(
            f"{name}'s momentum takes the place of the optimizer's, which has one too: give it momentum=0", stacklevel=3
        )
