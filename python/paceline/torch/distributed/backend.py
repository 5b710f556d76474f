"""The backend: the life of a process group, and its barriers. Its operations are in the classes that it is made of."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Backend, ErrorType, Store
from torch.distributed.distributed_c10d import _get_default_store

from paceline.common import abi
from paceline.torch._untraced import untraced
from paceline.torch.distributed import buckets, callbacks, latest, names, stand_in, streams, versions, worlds
from paceline.torch.distributed.exchanges import Exchanges
from paceline.torch.distributed.group import Group
from paceline.torch.distributed.job import World
from paceline.torch.distributed.messages import Messages
from paceline.torch.distributed.monitored import monitored_barrier
from paceline.torch.distributed.reduce import Reductions
from paceline.torch.distributed.transfers import Transfers
from paceline.torch.distributed.work import PacelineWork

if TYPE_CHECKING or not names.OLDER:
    Base = Backend
else:
    from paceline.torch.distributed.older import PythonGroup as Base

# PyTorch keeps the part of a backend that is in C++, and finds nothing when the part in Python is gone.
_alive: set[PacelineBackend] = set()


@untraced
class PacelineBackend(Reductions, Transfers, Exchanges, Messages, Base):
    """The backend of one process group."""

    # PyTorch asks a subclass for each of these.
    supports_splitting = True  # the members of a new group need no other ranks to make it
    supports_coalescing = supports_shrinking = supports_reconfigure = supports_window = False
    _supports_time_estimate = False

    def __init__(self, world: World | None, group: Group, timeout: timedelta) -> None:
        super().__init__(group.rank, group.size)
        self._world, self._group, self._timeout = world, group, timeout
        self._options: Backend.Options | None = None
        self.spreads = -1  # the thread whose broadcasts are as stand_in.spread
        self.stand_ins: dict[int, int] = {}  # ranks of the group that give what lost ones should
        _alive.add(self)

    @classmethod
    def join(
        cls, title: str, store: Store, rank: int, size: int, ranks: Sequence[int], name: str, timeout: timedelta
    ) -> PacelineBackend:
        """The backend of a new group. ranks: of the default group, in any order; empty: it is the default one."""
        with versions.known():
            latest.install(PacelineBackend)
            buckets.install(PacelineBackend)
            callbacks.install()
        if ranks:
            world = None
            worlds.beside(ranks, title)
        else:
            world = worlds.begin(store, rank, size)
        return cls(world, Group(name, title, ranks or range(size), timeout), timeout)

    # The group

    @property
    def group(self) -> Group:
        """The group's ranks and operations."""
        return self._group

    def getBackendName(self) -> str:
        """The name under which it was registered."""
        return self._group.title

    @property
    def options(self) -> Backend.Options:
        """The options that a group which is split off begins with."""
        if self._options is None:
            self._options = Backend.Options(self._group.title, self._timeout)
            options: Any = self._options
            options.group_name, options.global_ranks_in_group = self._group.name, self._group.ranks
        return self._options

    def split(self, store: Store, ranks: Sequence[int], options: Backend.Options) -> PacelineBackend:
        """A group of some of this group's ranks. Raises RuntimeError on others: PyTorch asks them only beside NCCL."""
        if self._group.rank not in ranks:
            raise RuntimeError(f"rank {self._group.rank} is not among {list(ranks)}: use new_group, which all may call")
        members = [self._group.ranks[r] for r in ranks]
        timeout = options._timeout
        return PacelineBackend(None, Group(options.group_name, self._group.title, members, timeout), timeout)

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Nothing: all ranks are connected."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Nothing: PyTorch asks ranks for their part in a new group without them."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time after which operations that are called from now on fail."""
        self._timeout, self._group.timeout_s = timeout, timeout.total_seconds()
        if self._options is not None:
            self._options._timeout = timeout

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._group.count

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: every group counts from 0."""

    def get_error(self) -> ErrorType:
        """Success: an operation says itself what is wrong."""
        return ErrorType.SUCCESS

    def shutdown(self) -> None:
        """Ends the group; the default one leaves the job."""
        self._group.close()
        _alive.discard(self)
        if self._world is not None:
            self._world.leave()

    def abort(self) -> None:
        """Ends the group, and its works in flight with an error."""
        self.shutdown()

    # What is done otherwise while `stand_in.spreading` lasts

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> PacelineWork:
        """Sends the root's tensor to all."""
        if self.spreads == threading.get_ident():
            return latest.started(stand_in.spread(self, tensors, options.rootRank))
        return super().broadcast(tensors, options)

    # Barriers

    def barrier(self, options: Any) -> PacelineWork:
        """Ends when every rank of the group has called it."""
        # Callbacks of the future have streams of these.
        memory = [torch.empty(0, device=device) for device in streams.devices(options.device_ids)]
        return self._run("barrier", lambda: self._group.op(abi.BARRIER, (), abi.UINT8, 0, 0), memory, None, [], options)

    def monitored_barrier(self, options: Any, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks which do not come in time."""
        timeout = options.timeout if options.timeout >= timedelta(0) else self._timeout
        monitored_barrier(_get_default_store(), self._group, timeout, wait_all_ranks)
