"""Broadcasts of models, optimizers and objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from paceline.common.engine import engine
from paceline.common.handles import synchronize
from paceline.common.objects import allgather_object as allgather_object
from paceline.common.objects import broadcast_object as broadcast_object
from paceline.common.process_sets import ProcessSet, global_process_set
from paceline.torch._cross_barrier import settle
from paceline.torch._ops_async import broadcast_async_
from paceline.torch._parameters import empty_sparse
from paceline.torch._traveling import packed, unpacked


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Fills tensors in place with root_rank's values.

    params: a dict such as model.state_dict(), or a list or iterator of tensors or of (name, tensor) such as
    model.named_parameters(). Raises ValueError for anything else, before it sends anything.
    """
    if isinstance(params, dict):
        params = sorted(params.items())
    elif isinstance(params, (str, torch.Tensor)) or not isinstance(params, Iterable):
        raise ValueError(f"broadcast_parameters takes a dict or a list of tensors, not {type(params).__name__}")
    named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"broadcast_parameters: {'an entry' if name is None else repr(name)} is no tensor but of type "
                f"{type(tensor).__name__}; leave it out, or use broadcast_object"
            )
    handles = [broadcast_async_(tensor, root_rank, name and f"broadcast.{name}", process_set) for name, tensor in named]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank's optimizer the state and the options of root_rank's.

    The optimizers must have the same groups of parameters; their states may differ or be missing. Tensors of the same
    shape and type are filled in place, scalars keep their types, and entries that the root lacks are dropped. Unlike
    Horovod, it creates a missing state without a step; gradients are zero afterwards nevertheless. model: tells SGD's
    parameters with sparse gradients. Raises ValueError for torch.optim.LBFGS and for other groups.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of torch.optim.LBFGS cannot be broadcast: its tensors lie in nested lists")
    settle()
    if not optimizer.state:
        _clear_gradients(optimizer, model)
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    sizes, options, layout = broadcast_object(
        (
            [len(group["params"]) for group in groups],
            [packed({k: v for k, v in group.items() if k != "params"}) for group in groups],
            [_layout(p, optimizer.state.get(p, {})) for p in params],
        ),
        root_rank,
        process_set=process_set,
    )
    if sizes != [len(group["params"]) for group in groups]:
        raise ValueError(
            f"rank {root_rank}'s optimizer has groups of {sizes} parameters and this rank's has "
            f"{[len(group['params']) for group in groups]}: they must be alike"
        )
    if engine.rank() != root_rank:
        filled: dict[int, torch.Tensor] = {}
        for group, option in zip(groups, options, strict=True):
            device = next((p.device for p in group["params"]), torch.device("cpu"))
            group.update(unpacked(option, group, device, filled))
        for p, wanted in zip(params, layout, strict=True):
            _adopt_layout(optimizer.state, p, wanted)
    tensors = [
        value
        for p in params
        for _, value in sorted(optimizer.state.get(p, {}).items())
        if isinstance(value, torch.Tensor)
    ]
    broadcast_parameters(tensors, root_rank, process_set)


def _clear_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Gives every parameter that requires a gradient one of zeros."""
    modules = [] if model is None else [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m.sparse]
    sparse = {p for m in modules for p in m.parameters()} if isinstance(optimizer, torch.optim.SGD) else set()
    for p in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        is_sparse = p in sparse or isinstance(optimizer, torch.optim.SparseAdam)
        p.grad = empty_sparse(p) if is_sparse else torch.zeros_like(p)


class _TensorLayout(tuple[Any, ...]):
    """(shape, dtype, whether it is on the parameter's device) of a tensor whose values are broadcast later."""


def _layout(p: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _TensorLayout((tuple(v.shape), v.dtype, v.device == p.device)) if isinstance(v, torch.Tensor) else v
        for name, v in state.items()
    }


def _adopt_layout(states: dict[Any, Any], p: torch.Tensor, wanted: dict[str, Any]) -> None:
    """Gives the parameter's state the root's entries; tensors have the root's shapes, but not yet its values."""
    old = states.pop(p, {})
    if not wanted:
        return
    states[p] = {name: _like(old.get(name), p, v) if isinstance(v, _TensorLayout) else v for name, v in wanted.items()}


def _like(old: Any, p: torch.Tensor, layout: _TensorLayout) -> torch.Tensor:
    shape, dtype, on_device = layout
    if isinstance(old, torch.Tensor) and tuple(old.shape) == shape and old.dtype == dtype:
        return old
    device = p.device if on_device else torch.device("cpu")
    if shape == tuple(p.shape):
        return torch.empty_like(p, dtype=dtype, device=device, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=device)
