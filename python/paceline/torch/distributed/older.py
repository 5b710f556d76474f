"""PyTorch 2.7 to 2.13, where process groups can be written in Python, but not their backends: the backend is its group.

PyTorch's functions in Python call its methods as they are; those in C++ reach the operations that training needs, by
what ProcessGroup lets a subclass override. Such a group has no other backend beside.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Backend, BackendConfig

from paceline.torch.distributed import names

# Operations whose options PyTorch makes where a caller gives none: how many arguments are tensors, the options, and
# which of them the short form has after the tensors: `group.broadcast(tensor, root)`.
_OPERATIONS: dict[str, tuple[int, Any, tuple[str, ...]]] = {
    "allreduce": (1, c10d.AllreduceOptions, ("reduceOp",)),
    "allreduce_coalesced": (1, c10d.AllreduceCoalescedOptions, ()),
    "reduce": (1, c10d.ReduceOptions, ("rootRank", "reduceOp")),
    "broadcast": (1, c10d.BroadcastOptions, ("rootRank",)),
    "allgather": (2, c10d.AllgatherOptions, ()),
    "allgather_coalesced": (2, c10d.AllgatherOptions, ()),
    "allgather_into_tensor_coalesced": (2, c10d.AllgatherOptions, ()),
    "all_gather_single_coalesced": (2, c10d.AllgatherOptions, ()),
    "gather": (2, c10d.GatherOptions, ("rootRank",)),
    "scatter": (2, c10d.ScatterOptions, ("rootRank",)),
    "reduce_scatter": (2, c10d.ReduceScatterOptions, ("reduceOp",)),
    "reduce_scatter_tensor_coalesced": (2, c10d.ReduceScatterOptions, ()),
    "reduce_scatter_single_coalesced": (2, c10d.ReduceScatterOptions, ()),
    "alltoall": (2, c10d.AllToAllOptions, ()),
    "barrier": (0, c10d.BarrierOptions, ()),
}
# The same for those that take single tensors, of which a list would be another operation's.
_SINGLE: dict[str, tuple[int, Any, tuple[str, ...]]] = {
    "_allgather_base": (2, c10d.AllgatherOptions, ()),
    "all_gather_single": (2, c10d.AllgatherOptions, ()),
    "_reduce_scatter_base": (2, c10d.ReduceScatterOptions, ()),
    "reduce_scatter_single": (2, c10d.ReduceScatterOptions, ()),
    "alltoall_base": (4, c10d.AllToAllOptions, ()),
    "all_to_all_single": (4, c10d.AllToAllOptions, ()),
}
_NAMED = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


class PythonGroup(c10d.ProcessGroup):
    """A process group that is its own backend."""

    monitored_barrier: Any
    _name = _description = ""

    def __init_subclass__(cls) -> None:
        for name, how in (_OPERATIONS | _SINGLE).items():
            setattr(cls, name, _with_options(getattr(cls, name), name in _OPERATIONS, *how))
        cls.monitored_barrier = _with_timeout(cls.monitored_barrier)
        setattr(cls, "getBackendName", lambda _: "custom")  # noqa: B010  # as of groups with plugins from 2.14 on

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in names.device_types()]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def setGroupName(self, name: str) -> None:  # noqa: D102  # PyTorch's
        self._name = name

    def getGroupName(self) -> str:  # noqa: D102
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: D102
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: D102
        return self._description


def _with_options(
    method: Callable[..., Any], lists: bool, tensors: int, make: Any, fields: Sequence[str]
) -> Callable[..., Any]:
    """The method, with the forms of its arguments that ProcessGroup has.

    Tensors have names such as `output`, `output_tensors`, `outputTensor`. Raises TypeError for wrong arguments.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, opts: Any = None, **named: Any) -> Any:
        by_name = [n for n in named if n.startswith(("tensor", "output", "input"))]
        by_name.sort(key=lambda n: ("split" in n, n.startswith("input")))
        given, rest = [*args[:tensors], *map(named.pop, by_name)], [*args[tensors:]]
        if opts is None and rest and isinstance(rest[0], make):
            opts, *rest = rest
        if opts is None:
            unknown = [*(named.keys() - _NAMED), *rest[len(fields) + 1 :]]
        else:
            unknown = [*named, *rest]
        if unknown or len(given) != tensors:
            raise TypeError(
                f"{method.__name__} of a process group takes {tensors} arguments for tensors, and then opts, or "
                f"{', '.join((*fields, 'timeout'))}; it was given {len(given)} and {[*args[tensors:], *named]}"
            )
        if opts is None:
            opts = make()
            values = dict(zip((*fields, "timeout"), rest, strict=False)) | {_NAMED[n]: v for n, v in named.items()}
            for field, value in values.items():
                if value is not None:
                    setattr(opts, field, value)
        if lists and any(isinstance(t, torch.Tensor) for t in given):
            given = [[t] for t in given]
        return method(self, *given, opts)

    return call


def _with_timeout(method: Callable[..., None]) -> Callable[..., None]:
    """monitored_barrier, whose options PyTorch makes from 2.14 on."""

    @functools.wraps(method)
    def call(self: Any, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        options = c10d.BarrierOptions()
        if timeout is not None:
            options.timeout = timeout
        method(self, options, wait_all_ranks)

    return call


def install() -> None:
    """Has groups get our backend where all that they ask for are names of ours (`names.ours`) at their making.

    PyTorch knows its own backends before it looks at those that were registered.
    """
    make: Any = distributed_c10d._new_process_group_helper
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        asked = given.arguments["backend"]
        backends = names.of_group(asked)
        others = backends - {names.NAME}
        if names.NAME in backends and others:
            raise ValueError(
                f"{str(asked)!r}: before PyTorch 2.14, and this is {torch.__version__}, a group that has the backend "
                f"{names.NAME!r} has no other one: make a group with each"
            )
        if others and others <= names.ours:
            given.arguments["backend"] = names.NAME
            group, store = make(*given.args, **given.kwargs)
            if store is not None:  # this rank is a member
                group.group.title = asked
                world = distributed_c10d._world
                world.pg_map[group], world.pg_backend_config[group] = (asked, store), str(BackendConfig(Backend(asked)))
            return group, store
        if others & names.ours:
            warnings.warn(
                f"PACELINE_TAKEOVER leaves groups with {str(asked)!r} as they are: before PyTorch 2.14, and this is "
                f"{torch.__version__}, a group with Paceline has no other backend",
                stacklevel=3,
            )
        return make(*args, **kwargs)

    setattr(distributed_c10d, "_new_process_group_helper", made)  # noqa: B010
    for module in (distributed_c10d, torch.distributed):
        setattr(module, "monitored_barrier", _monitored_barrier)  # noqa: B010
    setattr(distributed_c10d, "_set_pg_timeout", _set_timeout)  # noqa: B010


def _python_group(group: Any) -> PythonGroup | None:
    """The group, None for the default one, if it is one of these."""
    whole: Any = distributed_c10d._get_default_group() if group is None else group
    return whole if isinstance(whole, PythonGroup) else None


# What PyTorch does for groups with its own backends alone.
_their_barrier, _set_their_timeout = distributed_c10d.monitored_barrier, distributed_c10d._set_pg_timeout


@functools.wraps(_their_barrier)
def _monitored_barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    whole = _python_group(group)
    if whole is None or distributed_c10d.get_backend(group) == Backend.GLOO:
        _their_barrier(group, timeout, wait_all_ranks)
    else:
        whole.monitored_barrier(timeout, wait_all_ranks)


@functools.wraps(_set_their_timeout)
def _set_timeout(timeout: timedelta, group: Any = None) -> None:
    whole = _python_group(group)
    if whole is None:
        _set_their_timeout(timeout, group)
    else:
        whole.set_timeout(timeout)
