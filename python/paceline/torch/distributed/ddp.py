"""Communication hooks for DistributedDataParallel: Paceline's codecs, and averages of those that are left.

Settings give one to every model: PACELINE_COMPRESSION, and PACELINE_ELASTIC. PyTorch's reducer without a hook divides
by the number of ranks that the job began with, before it sums.
"""

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BuiltinCommHookType,
    GradBucket,
    Reducer,
    _register_comm_hook,
)
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.common import abi, operators
from paceline.common.compression import Codec, check, codec_of
from paceline.common.engine import engine
from paceline.common.operation import Options, operation
from paceline.torch.distributed.backend import PacelineBackend
from paceline.torch.distributed.latest import unwrapped
from paceline.torch.distributed.memory import Memory, summand_of

_CPU = torch.device("cpu")
_BUILTIN = {BuiltinCommHookType.ALLREDUCE: allreduce_hook, BuiltinCommHookType.FP16_COMPRESS: fp16_compress_hook}


class DDPState:
    """The state of `ddp_hook`. Each model has its own, made in the same order on every rank of its group.

    compression: a codec, such as hvd.Compression.topk(0.01), a codec's setting, rules, or the path of a file with
        them; None for the job's (PACELINE_COMPRESSION).
    named_parameters: the model's, so that rules go by names and what a codec keeps stays with its parameter when
        DistributedDataParallel forms new buckets after the first step.
    group: the process group, None for the default one. Raises ValueError for a group of another backend.
    """

    def __init__(
        self,
        compression: Codec | str | None = None,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] = (),
        group: ProcessGroup | None = None,
    ) -> None:
        codec = None if compression is None else codec_of(compression)
        if codec is None and compression is not None:
            raise ValueError(f"{compression!r} is no codec: use hvd.Compression.fp16, a codec's setting, or rules")
        if codec is not None:
            check(codec)
        self.options = Options(codec=None if codec is None else codec.text)
        self.names = {p: name for name, p in named_parameters}
        self.backend = backend_of(group, next((p.device for p in self.names), _CPU))
        self.prefix = self.backend.group.next_model()


def ddp_hook(state: DDPState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket, each gradient coded as the state says: `model.register_comm_hook(DDPState(...), ddp_hook)`.

    A sparse gradient, which has a bucket of its own, is averaged as it is.
    """
    if bucket.buffer().is_sparse:
        return average_hook(state.backend, bucket)
    group = state.backend.group
    memory = [Memory(g) for g in bucket.gradients()]
    parameters: list[Any] = bucket.parameters()  # torch calls them tensors
    ops = []
    for place, (m, p) in enumerate(zip(memory, parameters, strict=True)):
        name = state.names.get(p) or f"bucket {bucket.index()}.{place} of {tuple(m.tensor.shape)}"
        dtype, count = summand_of(m.tensor)
        ops.append(
            operation(
                abi.ALLREDUCE,
                dtype,
                (count,),
                m.address(),
                m.address(),
                reduce_op=operators.Average,
                process_set=group.number,
                name=f"{state.prefix}.{name}",
                options=state.options,
            )
        )

    def finish(_: Any) -> None:
        for m in memory:
            m.store()

    future = group.start("ddp_hook", ops, memory, finish, bucket.buffer()).get_future()
    # The value of a future that has failed is no tensor; of what follows such a future the reducer gets the error.
    return torch.futures.Future.then(future, torch.futures.Future.value)


def average_hook(backend: PacelineBackend, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket over the ranks that gave theirs."""
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.AVG
    future = backend.allreduce([bucket.buffer()], options).get_future()
    return torch.futures.Future.then(future, _first)


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


def backend_of(group: ProcessGroup | None, device: torch.device = _CPU) -> PacelineBackend:
    """The backend of a process group for tensors on a device. Raises ValueError for another's."""
    default = distributed_c10d._get_default_group() if group is None else group
    backend = unwrapped(default._get_backend(device))
    if not isinstance(backend, PacelineBackend):
        raise ValueError(
            f'the backend of the process group is {backend.name()}: init_process_group("paceline"), or '
            "PACELINE_TAKEOVER=gloo"
        )
    return backend


@dataclasses.dataclass
class _Ours:
    """The hook of a model that the settings give it, until the script registers its own: PyTorch takes one hook."""

    state: Any
    hook: Any


def _call(ours: _Ours, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return ours.hook(ours.state, bucket)


# By reducer: a model that is copied or unpickled makes another one, without a hook. None: the script's own.
_hooks: weakref.WeakKeyDictionary[Reducer, _Ours | None] = weakref.WeakKeyDictionary()


def our_backend(model: Any) -> PacelineBackend | None:
    """The backend of a model's process group for its device, None where it is another's."""
    try:
        return backend_of(model.process_group, model.device)
    except (RuntimeError, ValueError):  # PyTorch's is for a device that the group has no backend for
        return None


def _hook_of_settings(model: Any) -> _Ours | None:
    backend = our_backend(model)
    if backend is None:
        return None
    if engine.setting("compression"):
        return _Ours(DDPState(None, model.module.named_parameters(), model.process_group), ddp_hook)
    return _Ours(backend, average_hook) if engine.setting("elastic") else None


@functools.cache
def install() -> None:
    """Gives every DistributedDataParallel that trains from now on the hook that the settings ask for.

    A hook that the script registers wins, with a warning where PACELINE_COMPRESSION then has no effect.
    """
    forward: Any = DistributedDataParallel.forward
    register: Any = DistributedDataParallel.register_comm_hook

    @functools.wraps(forward)
    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.reducer not in _hooks:
            ours = _hooks[self.reducer] = _hook_of_settings(self)
            if ours is not None:
                _register_comm_hook(self.reducer, ours, _call)
                self._comm_hooks.append((ours.hook, ours.state))
        return forward(self, *args, **kwargs)

    @functools.wraps(register)
    def register_own(self: Any, state: Any, hook: Any) -> None:
        if our_backend(self) is not None and engine.setting("compression"):
            warnings.warn(
                "PACELINE_COMPRESSION does not apply to a model that has a communication hook of its own: "
                "unset it, or register paceline.torch.distributed.ddp_hook",
                stacklevel=2,
            )
        ours = _hooks.setdefault(self.reducer, None)
        if ours is None:
            register(self, state, hook)
        else:
            self._check_comm_hook(hook)
            ours.state, ours.hook = state, hook
            self._comm_hooks[-1] = hook, state

    changed = {"forward": begin, "register_comm_hook": register_own}
    for name, method in changed.items():
        setattr(DistributedDataParallel, name, method)


@functools.cache
def install_builtin() -> None:
    """Has PyTorch's built-in hooks be those in Python for our groups: in C++ they know works of C++ alone."""
    register: Any = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(register)
    def register_in_python(self: Any, comm_hook_type: Any) -> None:
        if our_backend(self) is None:
            register(self, comm_hook_type)
        else:
            self.register_comm_hook(self.process_group, _BUILTIN[comm_hook_type])

    setattr(DistributedDataParallel, "_register_builtin_comm_hook", register_in_python)  # noqa: B010
