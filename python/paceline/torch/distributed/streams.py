"""Streams of devices: how far the program's are, and ours, in which the outputs of operations are made.

Ours has nothing in it that waits: outputs do not wait for what the program queues after its call, nor for another
operation's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from paceline.torch._memory import accelerator

_ours: dict[torch.device, torch.Stream] = {}


def within(device: torch.device | None) -> Any:
    """Has the device, if any, be the thread's within a with block, after which it is the one before.

    Else what sets it for a while sets the thread's first one afterwards, GPU 0, which gives that a context of this
    process.
    """
    if device is None:
        return contextlib.nullcontext()
    if device.type == "cuda":
        return torch.cuda.device(device)
    index = getattr(torch.accelerator, "device_index", None)  # not in PyTorch 2.7
    return contextlib.nullcontext() if index is None else index(device.index)


def devices(indices: Sequence[int]) -> list[torch.device]:
    """The devices of the program that have these numbers, or the thread's. None where it has not begun to use any."""
    kind = accelerator()
    if not kind or not getattr(torch.get_device_module(kind), "is_initialized", bool)():
        return []
    here = [i for i in indices if i < torch.accelerator.device_count()]  # a process may see one of its host's devices
    return [torch.device(kind, i) for i in here or [torch.accelerator.current_device_index()]]


def current_device(among: Sequence[torch.device]) -> torch.device | None:
    """The thread's device, of the type of these."""
    return torch.device(among[0].type, torch.accelerator.current_device_index()) if among else None


def reached(where: Iterable[torch.device]) -> list[torch.Event]:
    """Events that happen when all is done that is queued in the current streams, without those that have happened."""
    events = []
    for device in where:
        with within(device):  # also where an event ends
            event = torch.accelerator.current_stream(device).record_event()
            if not event.query():
                events.append(event)
            del event
    return events


@contextlib.contextmanager
def ours(where: Iterable[torch.device]) -> Iterator[None]:
    """Has our streams be the current ones. What the block queues is done at its end."""
    with contextlib.ExitStack() as entered:
        streams = []
        for device in where:
            entered.enter_context(within(device))
            # Of high priority: PyTorch has 32 streams of each priority, and gives the program the others first.
            own = _ours.get(device) or _ours.setdefault(device, torch.Stream(device, priority=-1))
            # An object for each block, which keeps what was current before. Several threads, and handlers of signals,
            # may have one at a time.
            stream = torch.Stream(own.stream_id, own.device_index, own.device_type)
            streams.append(entered.enter_context(stream))
        try:
            yield
        finally:
            for stream in streams:
                stream.synchronize()


def use(value: Any, stream: torch.Stream | None = None) -> None:
    """Tells PyTorch that a stream, None for the current one, uses the tensors of a value.

    Else their memory is another's as soon as the last tensor is gone, whatever is still queued in that stream. Of
    futures among the values, the current streams follow what is queued for theirs.
    """
    if isinstance(value, torch._C.Future):
        if value.done():
            use(value.wait(), stream)
    elif isinstance(value, (list, tuple)):
        for part in value:
            use(part, stream)
    elif isinstance(value, torch.Tensor) and not value.is_cpu:
        if value.is_sparse:
            use([value._indices(), value._values()], stream)
        else:
            value.detach().record_stream(stream or torch.accelerator.current_stream(value.device))
