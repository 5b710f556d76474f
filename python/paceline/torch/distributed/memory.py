"""The memory of tensors that take part in torch.distributed's operations."""

from __future__ import annotations

from typing import Any

import torch

from paceline.common import abi
from paceline.torch._memory import _NUMBERS, accelerator, adopt, host_copy, host_room, on_accelerator


class Memory:
    """A tensor's elements in contiguous host memory: its own, or a copy, pinned for one on an accelerator.

    The memory lives as long as this, also where the tensor gets other memory.
    """

    __slots__ = ("_storage", "host", "tensor")

    def __init__(self, tensor: torch.Tensor, filled: bool = True) -> None:
        self.tensor = tensor
        if tensor.layout is not torch.strided or not (tensor.is_cpu or on_accelerator(tensor)):
            device = accelerator() or "cuda"
            raise ValueError(
                f"the backend takes dense tensors on the CPU or on {device}, not {tensor.layout} on {tensor.device}"
            )
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
            self.host = tensor
        else:
            self.host = host_copy(tensor) if filled else host_room(tensor)
        self._storage = self.host.untyped_storage()

    def place(self) -> tuple[int, int]:
        """Where the elements begin, and where they end."""
        return self.address(), self.address() + self.host.nbytes

    def separate(self) -> None:
        """Takes memory apart from the tensor, without values: for a result that must not come there before the end."""
        self.move(host_room(self.tensor))

    def move(self, host: torch.Tensor) -> None:
        """Takes other host memory, with what is in it."""
        self.host, self._storage = host, host.untyped_storage()

    def address(self) -> int:
        """Where the elements are."""
        return self.host.data_ptr()

    def store(self) -> None:
        """Gives a tensor that has not this memory the elements that are in it."""
        if self.host is not self.tensor:
            self.tensor.detach().copy_(self.host)


def devices_of(value: Any) -> set[torch.device]:
    """The devices beside the CPU of what an operation has: a tensor, the memory of one, or lists of these."""
    if isinstance(value, Memory):
        value = value.tensor
    if isinstance(value, torch.Tensor):
        return set() if value.is_cpu else {value.device}
    return set().union(*map(devices_of, value))


def kind_of(tensor: torch.Tensor) -> tuple[int, int]:
    """(the engine's number of an element type, how many elements) for a tensor whose bytes are moved only."""
    number = _NUMBERS.get(tensor.dtype)
    return (abi.UINT8, tensor.nbytes) if number is None else (number, tensor.numel())


def summand_of(tensor: torch.Tensor) -> tuple[int, int]:
    """(the engine's number of an element type, how many elements) for a tensor that is reduced.

    A complex number is two numbers. Raises ValueError for a type that cannot be reduced.
    """
    if tensor.is_complex():
        real = {torch.complex64: abi.FLOAT32, torch.complex128: abi.FLOAT64}.get(tensor.dtype)
        if real is not None:
            return real, 2 * tensor.numel()
    number = abi.UINT8 if tensor.dtype is torch.bool else _NUMBERS.get(tensor.dtype)
    if number is None:
        raise ValueError(f"tensors of type {tensor.dtype} cannot be reduced: convert it first")
    return number, tensor.numel()


def flat(memory: Any, like: torch.Tensor) -> torch.Tensor:
    """What the engine has allocated, as elements of a tensor's type."""
    count = 0 if memory is None else len(memory) // like.element_size()
    return adopt(memory, like.dtype, (count,))
