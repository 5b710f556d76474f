"""Values with tensors, as they travel in pickled objects: a tensor of GPU 1 would arrive on GPU 1 of every rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class _FromDevice(NamedTuple):
    """A tensor that is on an accelerator, in host memory."""

    host: torch.Tensor


def packed(value: Any) -> Any:
    """The value, with tensors on accelerators in host memory."""
    if isinstance(value, torch.Tensor):
        return value if value.is_cpu else _FromDevice(value.detach().cpu())
    return _each(lambda part, _: packed(part), value, None)


def unpacked(value: Any, own: Any, device: torch.device, filled: dict[int, torch.Tensor] | None = None) -> Any:
    """A value that was packed, whose tensors are on this rank's device.

    own: what this rank has in its place. Its tensors on accelerators get the elements where shape and type are the
    same: the program, or a CUDA graph, may have them. filled: those that have got theirs, by id; groups may share one.
    """
    filled = {} if filled is None else filled
    if not isinstance(value, _FromDevice):
        return _each(lambda part, mine: unpacked(part, mine, device, filled), value, own)
    if isinstance(own, torch.Tensor) and not own.is_cpu:
        if own.shape == value.host.shape and own.dtype == value.host.dtype:
            if id(own) not in filled:
                filled[id(own)] = own
                with torch.no_grad():
                    return own.copy_(value.host)
            if torch.equal(own.detach().cpu(), value.host):
                return own
        device = own.device
    return value.host.to(device)


def _each(change: Any, value: Any, own: Any) -> Any:
    """A dict, list or tuple with changed parts, each given with what `own` has there."""
    if type(value) is dict:
        return {k: change(v, own.get(k) if isinstance(own, dict) else None) for k, v in value.items()}
    if type(value) not in (list, tuple):
        return value
    mine = own if isinstance(own, (list, tuple)) and len(own) == len(value) else [None] * len(value)
    return type(value)(map(change, value, mine))
