"""The memory of tensors for the engine: dense, in row-major order, on the host.

The engine uses a contiguous CPU tensor in place. A tensor with other strides (such as channels_last) or on another
device is copied to contiguous host memory, so that ranks need not have the same layout. Copies from and to a CUDA
device, or another accelerator of PyTorch, follow the current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.common import abi

_NUMBERS = {
    torch.uint8: abi.UINT8,
    torch.int8: abi.INT8,
    torch.int16: abi.INT16,
    torch.int32: abi.INT32,
    torch.int64: abi.INT64,
    torch.float16: abi.FLOAT16,
    torch.bfloat16: abi.BFLOAT16,
    torch.float32: abi.FLOAT32,
    torch.float64: abi.FLOAT64,
    torch.bool: abi.BOOL,
}


def dtype_number(tensor: torch.Tensor, *, reduces: bool = False) -> int:
    """The engine's number for the tensor's element type. Raises ValueError if the operation cannot use the tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else "sparse"
        raise ValueError(
            f"a {kind} tensor has no dense memory: send its parts, or make it dense; for sparse COO tensors there is "
            "sparse_allreduce_async"
        )
    if tensor.is_meta:
        raise ValueError(
            "a tensor on device meta has no elements to send: tensors are on the CPU, or can be copied to it"
        )
    number = _NUMBERS.get(tensor.dtype)
    if number is None or (reduces and number == abi.BOOL):
        raise ValueError(
            f"tensors of type {tensor.dtype} cannot be {'reduced' if reduces else 'sent'}: "
            f"convert it first, for example to {'torch.float32' if number is None else 'torch.uint8'}"
        )
    return number


_plain = {torch.Tensor, torch.nn.Parameter}
_strided = torch.strided


def number_if_direct(tensor: torch.Tensor) -> int | None:
    """The engine's number for the element type of an ordinary tensor whose own memory it can use; None for others."""
    if (
        type(tensor) in _plain
        and tensor.is_cpu
        and tensor.layout is _strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_neg()
    ):
        return _NUMBERS.get(tensor.dtype)
    return None


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether the engine can use the tensor's own memory."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


def accelerator() -> str:
    """The type of the devices that this PyTorch has beside the CPU, such as "cuda"; "" if it has none."""
    if not hasattr(torch, "accelerator"):  # before PyTorch 2.6
        return "cuda"
    found = torch.accelerator.current_accelerator()
    return "" if found is None else found.type


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Whether the tensor is on a CUDA device, or on another accelerator that PyTorch has here."""
    return tensor.is_cuda or (not tensor.is_cpu and tensor.device.type == accelerator())


def current_stream(device: torch.device) -> Any:
    """The stream of the thread on an accelerator."""
    streams = torch.accelerator if hasattr(torch, "accelerator") else torch.cuda
    return streams.current_stream(device)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous host tensor with the same elements, pinned if the tensor is on an accelerator."""
    return host_room(tensor).copy_(tensor.detach())


def host_room(like: torch.Tensor) -> torch.Tensor:
    """A contiguous host tensor without values, pinned if `like` is on an accelerator."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=on_accelerator(like))


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if the engine can use its memory, else a host copy."""
    return tensor if is_direct(tensor) else host_copy(tensor)


_OTHER_MEMORY = (
    "a tensor got other memory while an operation that uses it was in flight (tensor.data = ..., set_, resize_): "
    "synchronize the operation's handle before you change its tensor"
)


class Lent:
    """The memory of a tensor while the engine uses it: it lives as long as this, whatever becomes of the tensor.

    Only a storage that is resized loses it: PyTorch lets nobody forbid that for a while.
    """

    __slots__ = ("_address", "_owner", "_storage")

    def __init__(self, tensor: torch.Tensor, written: bool) -> None:
        """written: the result is to be found in the tensor."""
        self._storage = tensor.untyped_storage()
        self._owner = tensor if written else self._storage
        self._address = self._owner.data_ptr()

    def check(self) -> None:
        """Raises RuntimeError if what was lent was freed meanwhile, or the tensor has not got the result."""
        if self._owner.data_ptr() != self._address:
            raise RuntimeError(_OTHER_MEMORY)


def lent(source: torch.Tensor, target: torch.Tensor | None = None) -> tuple[Lent, ...]:
    """What an operation reads, and writes into."""
    if target is None:
        return (Lent(source, False),)
    return (Lent(target, True),) if source is target else (Lent(source, False), Lent(target, True))


def to_device(host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The host tensor on the device of `like`."""
    return host if like.is_cpu else host.to(like.device, non_blocking=host.is_pinned())


def sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A sparse tensor on the device of its values."""
    return torch.sparse_coo_tensor(indices, values, shape, device=values.device, check_invariants=False)


def adopt(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor on memory that the engine allocated (None: no bytes), which is freed with the tensor.

    It is no view, which autograd lets no program change in place where a Function has returned it.
    """
    if memory is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape)  # type: ignore[call-overload]


_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def is_shared(storage: torch.UntypedStorage) -> bool:
    """Whether the memory may be that of several tensors. Old builds of PyTorch without CUDA do not know."""
    return _use_count is None or _use_count(storage._cdata) != _uses_of_one


_uses_of_one = 0
if _use_count is not None:
    _alone = torch.empty(1, device="cpu")
    _held = _alone.untyped_storage()  # as callers hold it: in some releases that counts
    _uses_of_one = _use_count(_held._cdata)


def part(p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Copies a gradient that may have the same memory as another parameter's, which a sum in place would change.

    Returns what is the parameter's gradient then. Backward gives two parameters one tensor where they were added
    through views, as in `a.t() + b.t()`. What the program itself has made a part of one flat gradient stays where it
    is: it is a view, or backward has added to it.
    """
    if type(grad) not in _plain or grad.layout is not _strided or not grad.is_cpu or grad._is_view():
        return grad
    storage = grad.untyped_storage()
    if is_shared(storage) and (grad.is_inference() or grad._version == 0 or storage.nbytes() == grad.nbytes):
        p.grad = grad = grad.detach().clone()
    return grad
