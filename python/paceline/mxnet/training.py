"""DistributedTrainer for Gluon, DistributedOptimizer for everything else, and broadcasts of parameters."""

from __future__ import annotations

import types
import warnings
from collections.abc import Mapping
from typing import Any

import mxnet as mx

from paceline.common.compression import split
from paceline.common.operators import Average
from paceline.common.process_sets import ProcessSet, global_process_set, place_in
from paceline.mxnet.compression import Compression
from paceline.mxnet.mpi_ops import allreduce_, broadcast_


class _Reduction:
    """Averages gradients over the ranks of a set, each into its own array."""

    def __init__(self, compression: Any, predivide: float, process_set: ProcessSet, sync: Any) -> None:
        self.compressor, options = split(compression)
        self.process_set = process_set
        codec = options.codec
        self.how: dict[str, Any] = {"prescale_factor": 1 / predivide, "postscale_factor": predivide, "op": Average}
        self.how |= {"process_set": process_set, "compression": codec, "sync": sync}

    def __call__(self, gradient: Any, name: str, priority: int) -> None:
        """Has the gradient be that of all ranks; on a rank outside of the set, and in a set of one, nothing."""
        rank, size = place_in(self.process_set)
        if rank < 0 or size == 1:
            return
        dense = gradient if gradient.stype == "default" else gradient.tostype("default")
        compressed, context = self.compressor.compress(dense)
        allreduce_(compressed, None, name, priority, **self.how)
        result = self.compressor.decompress(compressed, context)
        if result is not gradient:
            (result if gradient.stype == "default" else result.tostype(gradient.stype)).copyto(gradient)


class DistributedOptimizer(mx.optimizer.Optimizer):
    """Wraps an optimizer so that each gradient is averaged over the ranks before it is applied.

    gradient_predivide_factor: splits the division, before and after the sum. num_groups: Horovod's, without effect, as
    the engine batches what is ready. process_set: others only update. compression, sync: as `DistributedTrainer`.
    """

    def __init__(
        self,
        optimizer: mx.optimizer.Optimizer,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        compression: Any = Compression.none,
        sync: Any = None,
    ) -> None:
        reduction = _Reduction(compression, gradient_predivide_factor, process_set, sync)
        self.__setstate__({"_optimizer": optimizer, "_reduction": reduction})

    # Everything else is the wrapped optimizer's: Trainer and Module read and set attributes such as rescale_grad.
    def __getattr__(self, item: str) -> Any:
        if item in ("_optimizer", "_reduction"):  # of an object that is being unpickled
            raise AttributeError(item)
        return getattr(self._optimizer, item)

    def __setattr__(self, item: str, value: Any) -> None:
        setattr(self._optimizer, item, value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def create_state(self, index: Any, weight: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """The wrapped optimizer's."""
        return self._optimizer.create_state_multi_precision(index, weight)

    def _reduce(self, index: Any, grad: Any) -> None:
        pairs = zip(index, grad, strict=True) if isinstance(index, tuple | list) else [(index, grad)]
        for i, gradient in pairs:
            self._reduction(gradient, f"optimizer.{i}", -i if isinstance(i, int) else 0)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Averages the gradient, or those of a list of indices, and updates."""
        self._reduce(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As `update`."""
        self._reduce(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

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

    params, optimizer, optimizer_params: those of mxnet.gluon.Trainer. compression: a Compressor or a codec of the
    engine. gradient_predivide_factor: splits the division, before and after the sum. prefix: tells several trainers of
    a program apart. num_groups: Horovod's, without effect. sync: a synchronisation model.
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
        sync: Any = None,
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
        self._reduction = _Reduction(compression, gradient_predivide_factor, process_set, sync)

    def _allreduce_grads(self) -> None:
        for i, param in enumerate(self._params):
            if param.grad_req != "null":
                self._reduction(param.list_grad()[0], f"{self._prefix}{i}", -i)


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
