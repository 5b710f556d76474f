"""The engine of a world: started with what torch.distributed's store says, or shared with Horovod's API."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator

from torch._C._distributed_c10d import Store
from torch.distributed import DistBackendError

from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError

_LOOPBACK = "127.0.0.1"
# The port of the scheduler in this process, which later worlds use too.
_ports: list[int] = []
# What a launcher says of a process's place. The store knows better.
_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


class World:
    """The job that a default process group runs on. Several worlds of a process follow one another."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._ours = not engine.is_initialized()
        if self._ours:
            _start(store, rank, size)
        elif (engine.rank(), engine.size()) != (rank, size):
            raise DistBackendError(
                f"rank {rank} of {size} in torch.distributed is rank {engine.rank()} of {engine.size()} in the job that"
                " hvd.init() has joined: a process has one job; call hvd.shutdown() first, or start all ranks as one"
            )
        self._round = engine.round

    def runs(self) -> bool:
        """Whether the job still runs."""
        return engine.runs(self._round)

    def leave(self) -> None:
        """Leaves the job, unless it is hvd.init()'s. Operations in flight end with an error."""
        if self._ours and self.runs():
            engine.shutdown()


def _start(store: Store, rank: int, size: int) -> None:
    try:
        with _rendezvous(store, rank, size) as environment:
            engine.init(settings={"stall_shutdown": 0}, environment=environment)
    except HorovodInternalError as e:
        raise DistBackendError(f"rank {rank} of {size} did not join the job: {e}") from None


def _launched(rank: int, size: int) -> bool:
    """Whether the environment names a scheduler, and this process's place as torch.distributed has it."""
    return "PACELINE_SCHEDULER" in os.environ and any(
        os.environ.get(r) == str(rank) and os.environ.get(s) == str(size)
        for r, s in (("PACELINE_RANK", "PACELINE_SIZE"), ("RANK", "WORLD_SIZE"))
    )


@contextlib.contextmanager
def _rendezvous(store: Store, rank: int, size: int) -> Iterator[dict[str, str]]:
    """The variables by which the engine finds its place and rank 0's scheduler, unless a launcher has set them on all.

    All ranks have come to the store then: the engine's own deadline for its start leaves out how late they are. A store
    may outlive a world, so each world has keys of its own.
    """
    prefix = f"paceline/{store.add(f'paceline/worlds/{rank}', 1)}"
    store.set(f"{prefix}/rank/{rank}", json.dumps([_launched(rank, size), _host()]))
    launched, hosts = zip(*(json.loads(store.get(f"{prefix}/rank/{r}")) for r in range(size)), strict=True)
    if all(launched):
        yield {}
        return
    local = [r for r in range(size) if hosts[r] == hosts[rank]]
    order = list(dict.fromkeys(hosts))
    with contextlib.ExitStack() as held:
        if rank == 0:
            host = _LOOPBACK if len(order) == 1 else _own_name()
            if not _ports:
                _ports.append(held.enter_context(_reserved_port()))
            store.set(f"{prefix}/scheduler", json.dumps([host, _ports[0]]))
        host, port = json.loads(store.get(f"{prefix}/scheduler"))
        numbers = (rank, size, local.index(rank), len(local), order.index(hosts[rank]), len(order))
        yield {
            **{f"PACELINE_{name}": str(number) for name, number in zip(_PLACE, numbers, strict=True)},
            "PACELINE_SCHEDULER": "",
            "PACELINE_PORT": str(port),
            "MASTER_ADDR": host,
        }


def _own_name() -> str:
    """The name by which other hosts reach this one: MASTER_ADDR, but for what each host calls itself."""
    name = os.environ.get("MASTER_ADDR", "")
    return socket.gethostname() if name in ("", "localhost", "::1") or name.startswith("127.") else name


def _host() -> str:
    """What processes on one host, which reach one another by loopback, have in common."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    return socket.gethostname()


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port, which the system gives to nobody meanwhile: a socket holds it that does not listen."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("", 0))
        yield s.getsockname()[1]
