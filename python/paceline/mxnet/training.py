"""DistributedTrainer for Gluon, DistributedOptimizer for everything else, and broadcasts of parameters."""

from __future__ import annotations

import math
import types
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import mxnet as mx

from paceline.common.arguments import warn_of_momentum
from paceline.common.engine import engine
from paceline.common.operators import Max
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.common.significance import Significance
from paceline.common.sync import Model
from paceline.mxnet._exchange import Exchange, Gradient, significance
from paceline.mxnet.compression import Compression
from paceline.mxnet.mpi_ops import allreduce, broadcast_

_optimizers: weakref.WeakSet[DistributedOptimizer] = weakref.WeakSet()


def _end_iterations() -> None:
    """A checkpoint comes behind a step, whose end an optimizer sees in the next one."""
    for optimizer in list(_optimizers):
        optimizer._end_iteration()


engine.before_checkpoint(_end_iterations)


class DistributedOptimizer(mx.optimizer.Optimizer):
    """Wraps an optimizer so that each gradient is averaged over the ranks before it is applied.

    For what calls `update` of an optimizer itself, such as `Module`; Gluon has `DistributedTrainer`, whose arguments
    and errors these are. Cached SSP, models with supersteps (adaptive, ElasticBSP), and those that use the significance
    of all gradients together, need a trainer, which knows where an iteration ends.

    Raises ValueError for what is no optimizer, and for such a model.
    """

    def __init__(
        self,
        optimizer: mx.optimizer.Optimizer,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        compression: Any = Compression.none,
        sync: Model | str | None = None,
        gate: Significance | None = None,
        pull_gate: Significance | None = None,
    ) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise ValueError(f"DistributedOptimizer wraps an mx.optimizer.Optimizer, not {type(optimizer).__name__}")
        exchange = Exchange(compression, gradient_predivide_factor, process_set, sync, gate, pull_gate, ["optimizer"])
        warn_of_momentum(exchange.asked, lambda: bool(getattr(optimizer, "momentum", 0)))
        model = exchange.model
        if model.ahead and (model.has_supersteps or model.asks_significance or model.alone):
            raise ValueError(
                f"sync={model.setting}: this model decides between iterations, of which an optimizer sees parameters "
                "alone; use DistributedTrainer, or paceline.SSP, ASP, PSSP, DSPS or an Expression"
            )
        self.__setstate__({"_optimizer": optimizer, "_exchange": exchange, "_seen": set()})

    # Everything else is the wrapped optimizer's: Trainer and Module read and set attributes such as rescale_grad.
    def __getattr__(self, item: str) -> Any:
        if item in ("_optimizer", "_exchange", "_seen"):  # of an object that is being unpickled
            raise AttributeError(item)
        return getattr(self._optimizer, item)

    def __setattr__(self, item: str, value: Any) -> None:
        setattr(self._optimizer, item, value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _optimizers.add(self)

    def create_state(self, index: Any, weight: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.create_state_multi_precision(index, weight)

    def _apply(self, update: Any, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """One update, of a parameter or of a list of them, with what the ranks exchange."""
        several = isinstance(index, tuple | list)
        triples = list(zip(index, weight, grad, strict=True)) if several else [(index, weight, grad)]
        name = f"{self._exchange.prefix}optimizer"
        gradients = [Gradient(f"{name}.{i}", g, w, -i if isinstance(i, int) else 0) for i, w, g in triples]
        held = self._exchange.held
        names = {g.name for g in gradients}
        if names & self._seen:  # a new iteration
            self._end_iteration()
        self._seen.update(names)
        if held is not None:
            weights = {g.name: g.weight for g in gradients}
            before = held.begin(weights)
            update(index, weight, grad, state)
            held.end(weights, before, whole=False)
            return
        self._exchange.reduce(gradients, self._optimizer.rescale_grad)
        update(index, weight, grad, state)

    def _end_iteration(self) -> None:
        if self._seen:
            (self._exchange.held or self._exchange).clock()
            self._seen.clear()

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Averages the gradient, or those of a list of indices, and updates."""
        self._apply(self._optimizer.update, index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As `update`."""
        self._apply(self._optimizer.update_multi_precision, index, weight, grad, state)

    def agree(self) -> None:
        """As `DistributedTrainer.agree`."""
        self._exchange.agree()

    def set_learning_rate(self, lr: float) -> None:
        """The wrapped optimizer's."""
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: Any) -> None:
        """The wrapped optimizer's."""
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Any) -> None:
        """The wrapped optimizer's."""
        self._optimizer.set_wd_mult(args_wd_mult)


class DistributedTrainer(mx.gluon.Trainer):
    """A Gluon trainer whose `step` averages the gradients over the ranks of a process set.

    params, optimizer, optimizer_params: those of mxnet.gluon.Trainer.
    compression: hvd.Compression.fp16 or a Compressor of your own, or a codec of the engine, such as
        hvd.Compression.topk(0.01), "int8" or hvd.Compression.auto(). Default: PACELINE_COMPRESSION, else none.
    gradient_predivide_factor f: gradients are multiplied by 1/f before the sum and by f/size after it.
    prefix: stands before the names of the gradients, which are 0, 1 and so on. Where another trainer has the same ones,
        with a codec or a gate, those of the second to step are #2.0, #2.1. num_groups: Horovod's, without effect.
    process_set: the ranks that share their gradients; the others step alone.
    sync: the synchronisation model, such as paceline.SSP(3) or "ssp:3". Default: PACELINE_SYNC, else BSP. Under a model
        that lets ranks run ahead, the servers hold the parameters and each rank steps with its own gradients: the
        servers add the change, divided by the number of ranks, and the rank continues with the sum of all ranks'
        changes. At the end `agree` gives all ranks the same parameters.
    gate: paceline.Significance(...): a rank sends only significant changes; the others add up on it until they are.
        Gradients are compared as `step` rescales them, by the batch size.
    pull_gate: the same for pulls, under a model that lets ranks run ahead.

    Gates and models that use the significance wait for the gradients; nothing else waits in `step`.

    Raises ValueError for a gradient_predivide_factor, a codec, a gate or a model that cannot be, and in `step` for
    parameters that the servers cannot hold: on several devices, or sparse.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Any = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        sync: Model | str | None = None,
        gate: Significance | None = None,
        pull_gate: Significance | None = None,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer averages the gradients itself: it uses the optimizer in DistributedOptimizer",
                stacklevel=2,
            )
            optimizer = optimizer._optimizer
        if isinstance(params, Mapping):  # names may be in another order on other ranks
            params = [params[key] for key in sorted(params.keys())]
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        self._prefix = prefix or ""
        sizes = [math.prod(p.shape) * 4 for p in self._params if p.shape and min(p.shape) > 0]
        names, factor = [f"{self._prefix}{i}" for i in range(len(self._params))], gradient_predivide_factor
        self._exchange = Exchange(compression, factor, process_set, sync, gate, pull_gate, names, sizes)
        self._leaves_out = False  # in a step: the gradients that no rank has made
        warn_of_momentum(self._exchange.asked, lambda: bool(getattr(self._optimizer, "momentum", 0)))

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Averages the gradients over the ranks and updates the parameters, as mxnet.gluon.Trainer does on one.

        ignore_stale_grad: parameters that backward has not reached keep their values, and what codecs and gates hold
        back of them. One that it has reached on some ranks alone counts as zeros on the others, and all update it. The
        ranks exchange which they have: all pass the same here, else they wait for each other. `allreduce_grads` with
        `update` does not do that, as with Horovod: it averages what is left of the step before, and only ranks that
        have the gradient update.
        """
        self._leaves_out = ignore_stale_grad and self._exchange.is_distributed and self._exchange.held is None
        if self._leaves_out:
            self._count_stale_as_zeros()
        try:
            super().step(batch_size, ignore_stale_grad)
        finally:
            self._leaves_out = False

    def _count_stale_as_zeros(self) -> None:
        trained = [p for p in self._params if p.grad_req != "null"]
        if not trained:
            return
        here = [p.list_data()[0]._fresh_grad for p in trained]  # of the device whose gradient is exchanged
        flags = mx.nd.array(here, dtype="uint8")
        name = f"{self._prefix}fresh gradients"
        somewhere = allreduce(flags, name=name, op=Max, process_set=self._exchange.process_set).asnumpy()
        for p, mine, on_any_rank in zip(trained, here, somewhere, strict=True):
            if on_any_rank and not mine:
                mx.nd.zeros_like(p.list_grad()[0], out=p.list_grad()[0])
                p.list_data()[0]._fresh_grad = True

    def _gradients(self) -> list[Gradient]:
        """Of parameters on several devices the first one's."""
        trained = [(i, p) for i, p in enumerate(self._params) if p.grad_req != "null"]
        prefix = f"{self._exchange.prefix}{self._prefix}"
        return [Gradient(f"{prefix}{i}", p.list_grad()[0], p.list_data()[0], -i) for i, p in trained]

    def _allreduce_grads(self) -> None:
        gradients = self._gradients()
        if self._leaves_out:  # stale on all ranks: nobody would apply what codecs and gates give out
            gradients = [g for g in gradients if g.weight._fresh_grad]
        self._exchange.reduce(gradients, self._optimizer.rescale_grad)
        self._exchange.clock()

    def _update(self, ignore_stale_grad: bool = False) -> None:
        held = self._exchange.held
        if held is None:
            super()._update(ignore_stale_grad)
            return
        gradients = self._gradients()
        for p in self._params:
            if p.grad_req != "null" and (p._stype != "default" or len(p.list_data()) != 1):
                raise ValueError(f"{p.name} is sparse or on several devices: the servers hold dense ones of one device")
        weights = {g.name: g.weight for g in gradients}
        asks = self._exchange.model.asks_significance
        moved = significance(gradients, self._optimizer.rescale_grad) if asks else 0.0
        before = held.begin(weights)
        super()._update(ignore_stale_grad)
        held.end(weights, before, moved)

    def agree(self) -> None:
        """Waits for all ranks, then gives them the same parameters: the sum of all their changes.

        Every rank calls it, at the end of training or before a checkpoint, under models that let ranks run ahead; under
        others the parameters are the same anyhow. Changes that a gate withholds are not in it.
        """
        self._exchange.agree()


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Has every rank have root_rank's parameters.

    params: a dict of NDArrays or of Gluon parameters, such as `Block.collect_params()`. One that Gluon initialises
    later, when it sees the first input, is broadcast then. Raises ValueError for anything else.
    """
    if not isinstance(params, Mapping) and not hasattr(params, "items"):
        raise ValueError(f"params is a dict of arrays or parameters, not {type(params).__name__}")
    arrays = []
    for name, param in sorted(params.items()):
        label = f"{prefix or ''}{name}"
        if isinstance(param, mx.nd.NDArray):
            arrays.append((label, param))
            continue
        if not isinstance(param, mx.gluon.Parameter):
            raise ValueError(f"params[{name!r}] is an array or a parameter, not {type(param).__name__}")
        try:
            arrays.append((label, param.data()))
        except mx.gluon.parameter.DeferredInitializationError:
            param._init_impl = types.MethodType(_then_broadcast(param, root_rank, label), param)
    for label, array in arrays:
        broadcast_(array, root_rank, label)
    for _, array in arrays:
        array.wait_to_read()


def _then_broadcast(param: Any, root_rank: int, label: str) -> Any:
    initialise = param._init_impl

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(*args, **kwargs)
        broadcast_(self.data(), root_rank, label)
        self.data().wait_to_read()

    return wrapped
