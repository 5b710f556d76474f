"""When the engine starts: with the default group, or with the first group of ours beside a default group of another."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistBackendError, ProcessGroup, distributed_c10d

from paceline.torch.distributed import names, versions

if TYPE_CHECKING:
    from paceline.torch.distributed.job import World

# The worlds of default groups that have another backend.
_worlds: weakref.WeakKeyDictionary[ProcessGroup, World] = weakref.WeakKeyDictionary()


def begin(store: Store, rank: int, size: int) -> World:
    """The world of a default group, in which the engine runs. All ranks of the group call this."""
    from paceline.common.engine import engine

    with versions.known():
        from paceline.torch.distributed import ddp, group, job, stand_in

        ddp.install_builtin()
    _leave_earlier()
    world = job.World(store, rank, size)
    group.forget()
    if engine.setting("compression") or engine.setting("elastic"):
        with versions.known():
            ddp.install()
            stand_in.install()
    return world


def beside(ranks: Sequence[int], name: str, all_call: bool = False) -> None:
    """Begins the world of a default group that has another backend, unless it has begun.

    ranks, name: of the new group's members, and of its backend. all_call: whether all ranks call this, or members only.
    Raises DistBackendError where ranks would be missing.
    """
    from paceline.common.engine import engine

    default = distributed_c10d._get_default_group()
    backend, store = distributed_c10d._world.pg_map[default]
    if default in _worlds or names.is_ours(backend):
        return
    _leave_earlier()
    if not all_call and len(ranks) < default.size() and not engine.is_initialized():
        raise DistBackendError(
            f"the default group has the backend {str(backend)!r}: all ranks start Paceline's engine together, with the"
            f" first group of backend {name!r}, and this one has ranks {list(ranks)} alone. Call"
            f" new_group(backend={name!r}) on all ranks before"
        )
    world = _worlds[default] = begin(store, default.rank(), default.size())
    weakref.finalize(default, world.leave).atexit = False  # the engine ends by itself then


def _leave_earlier() -> None:
    """Leaves the worlds of default groups that were destroyed, to which somebody has kept a reference."""
    for default, world in list(_worlds.items()):
        if default not in distributed_c10d._world.pg_map:
            world.leave()
            del _worlds[default]


@functools.cache
def install() -> None:
    """Has all ranks begin the world with the first group of ours, also those that are not its members.

    Members alone make a group's backend. PyTorch calls what is replaced here on all ranks.
    """
    make: Any = distributed_c10d._new_process_group_helper
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_in_world(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        ranks, backend = given["global_ranks_in_group"], given["backend"]
        # PyTorch numbers groups. Those that only members make (use_local_synchronization=True) have other names.
        if ranks and str(given["group_name"]).isdigit() and names.is_ours(backend):
            beside(ranks, backend, all_call=True)
        return make(*args, **kwargs)

    setattr(distributed_c10d, "_new_process_group_helper", make_in_world)  # noqa: B010
