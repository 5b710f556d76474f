"""The buckets of DistributedDataParallel lie in the arena, where the servers of this host sum them in place.

DistributedDataParallel makes them in its reducer, once, and again after the first step. PyTorch can have a backend
allocate them (DDP_DISABLE_COMM_MEM=0), but 2.15 cannot ask one that is written in Python.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any

import torch
from torch._C._distributed_c10d import Reducer
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.torch._arena import zeros_in_arena
from paceline.torch.distributed import stand_in
from paceline.torch.distributed.latest import unwrapped

_LEAST = 64 << 10  # bytes: what is smaller gains nothing

_CPU = torch.device("cpu")
# Reducers that have not made their last buckets, with the backends of their groups.
_ours: weakref.WeakKeyDictionary[Reducer, Any] = weakref.WeakKeyDictionary()


class _InArena(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Large tensors without values are made in the arena."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and kwargs.get("layout") in (None, torch.strided):
            dtype, device = kwargs.get("dtype") or torch.get_default_dtype(), kwargs.get("device")
            if (device is None or device.type == "cpu") and torch.Size(args[0]).numel() * dtype.itemsize >= _LEAST:
                return zeros_in_arena(*args[0], dtype=dtype)
        return func(*args, **kwargs)


@functools.cache
def install(backend: type) -> None:
    """Has reducers of groups with such a backend make their buckets in the arena."""
    make, rebuild = Reducer.__init__, Reducer._rebuild_buckets

    @functools.wraps(make)
    def made(
        self: Reducer,
        params: Any,
        bucket_indices: Any,
        per_bucket_size_limits: Any,
        process_group: Any,
        *more: Any,
        **options: Any,
    ) -> None:
        on_cpu = _CPU in process_group._device_types
        found = unwrapped(process_group._get_backend(_CPU)) if on_cpu else None
        ours = isinstance(found, backend)
        with _InArena() if ours else contextlib.nullcontext():  # type: ignore[no-untyped-call]
            make(self, params, bucket_indices, per_bucket_size_limits, process_group, *more, **options)
        if ours:
            _ours[self] = found

    @functools.wraps(rebuild)
    def rebuilt(self: Reducer) -> bool:
        found = _ours.get(self)
        if found is None:
            return rebuild(self)
        with _InArena(), stand_in.spreading(found):  # type: ignore[no-untyped-call]
            done = rebuild(self)  # rank 0 broadcasts the order
        if done:
            del _ours[self]
        return done

    setattr(Reducer, "__init__", made)  # noqa: B010
    setattr(Reducer, "_rebuild_buckets", rebuilt)  # noqa: B010
