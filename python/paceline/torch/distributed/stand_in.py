"""Who gives what DistributedDataParallel takes from rank 0, in elastic jobs that may have lost it.

These are the buffers of a model, before each forward pass, and the order of its buckets, once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed import ReduceOp

from paceline.common.engine import engine

if TYPE_CHECKING:
    from paceline.torch.distributed.backend import PacelineBackend
    from paceline.torch.distributed.work import PacelineWork


def spread(backend: PacelineBackend, tensors: Sequence[torch.Tensor], root: int) -> PacelineWork:
    """Gives every rank the root's tensors, or those of the lowest rank that is left where the root is lost.

    It is a sum to which all others give zeros: unlike a broadcast it ends well whichever ranks and servers are lost
    meanwhile. Returns a work, which has ended.
    """
    devices = dict.fromkeys(t.device for t in tensors)
    return [_spread(backend, [t for t in tensors if t.device == device], root) for device in devices][-1]


def _spread(backend: PacelineBackend, tensors: Sequence[torch.Tensor], root: int) -> PacelineWork:
    own = [t.detach().reshape(-1).view(torch.uint8) for t in tensors]
    given = torch.cat([*own, own[0].new_ones(1)])  # the last byte says that the root has given its own
    while True:
        giver = backend.stand_ins.get(root, root)
        whole = given.clone() if giver == backend.group.rank else torch.zeros_like(given)
        work = _reduce(backend, whole, ReduceOp.SUM)
        if whole[-1]:
            break
        lowest = torch.tensor([backend.group.rank], device="cpu")
        _reduce(backend, lowest, ReduceOp.MIN)
        backend.stand_ins[root] = int(lowest)  # on all ranks, which have seen the same sums
    for tensor, values in zip(tensors, whole[:-1].split_with_sizes([part.numel() for part in own]), strict=True):
        tensor.detach().copy_(values.clone().view(tensor.dtype).view(tensor.shape))
    return work


def _reduce(backend: PacelineBackend, tensor: torch.Tensor, op: ReduceOp.RedOpType) -> PacelineWork:
    options = AllreduceOptions()
    options.reduceOp = op
    work = backend.allreduce([tensor], options)
    work.wait()
    return work


@contextlib.contextmanager
def spreading(backend: PacelineBackend) -> Iterator[None]:
    """Has the backend's broadcasts that this thread begins in an elastic job be as `spread`."""
    backend.spreads = threading.get_ident() if engine.setting("elastic") else -1
    try:
        yield
    finally:
        backend.spreads = -1


@functools.cache
def install() -> None:
    """Has models of an elastic job whose groups have our backend take their buffers as by `spread`."""
    from torch.nn.parallel import DistributedDataParallel

    from paceline.torch.distributed.ddp import our_backend

    broadcast: Any = DistributedDataParallel._default_broadcast_coalesced

    @functools.wraps(broadcast)
    def spread_buffers(self: Any, bufs: Any = None, bucket_size: Any = None, authoritative_rank: int = 0) -> None:
        backend = our_backend(self)
        if backend is None or not engine.setting("elastic"):
            broadcast(self, bufs, bucket_size, authoritative_rank)
        elif buffers := list(self.modules_buffers if bufs is None else bufs):
            spread(backend, buffers, authoritative_rank)

    setattr(DistributedDataParallel, "_default_broadcast_coalesced", spread_buffers)  # noqa: B010
