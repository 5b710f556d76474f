"""monitored_barrier: through the store, so that it works where the engine's operations do not."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store

from paceline.common.engine import engine
from paceline.torch.distributed.group import Group

_OK = "ok"
_LOOK_S = 0.25  # how often to look whether a rank is lost
_LONGEST_PAUSE_S = 0.02  # between two looks


def monitored_barrier(store: Store, group: Group, timeout: timedelta, wait_all_ranks: bool) -> None:
    """Waits until rank 0 has heard of all ranks. Raises RuntimeError, on rank 0 with the ranks that did not come.

    store: the default group's. wait_all_ranks: rank 0 waits for all and names all that did not come, instead of the
    first. A rank of the job that is lost ends the wait of all.
    """
    prefix = f"monitored/{engine.job_round():x}/{group.key}/{group.next_barrier()}"  # a store may outlive a world
    milliseconds = round(1000 * timeout.total_seconds())
    until = time.monotonic() + timeout.total_seconds()
    if group.rank > 0:
        store.set(f"{prefix}/{group.rank}", _OK)
        answer = _await_rank_0(store, f"{prefix}/0", until, milliseconds)
        if answer != _OK:
            raise RuntimeError(
                f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0. Please check rank 0 logs for faulty rank.\n Original exception: \n{answer}"
            )
        return
    if timeout <= timedelta(0):
        raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {milliseconds} ms.")
    why = _await_others(store, prefix, group.size, until, milliseconds, wait_all_ranks)
    store.set(f"{prefix}/0", why or _OK)
    if why:
        raise RuntimeError(why)
    with contextlib.suppress(RuntimeError, NotImplementedError):  # some stores keep all
        for key in filter(None, [group.answered, *(f"{prefix}/{rank}" for rank in range(1, group.size))]):
            store.delete_key(key)  # all have come, so all have read the answer before
    group.answered = f"{prefix}/0"


def _came(store: Store, key: str, until: float) -> bool:
    """Whether a key is there in time. Raises RuntimeError when the store has gone, or a rank is lost."""
    pause, look = 0.001, 0.0
    while not store.check([key]):
        now = time.monotonic()
        if now >= until:
            return False
        if now >= look:
            if (lost := engine.failure()) is not None:
                raise RuntimeError(lost)
            look = now + _LOOK_S
        time.sleep(min(pause, max(0.0, until - now)))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True


def _await_others(store: Store, prefix: str, size: int, until: float, milliseconds: int, wait_all_ranks: bool) -> str:
    """Why rank 0 has not heard of all others; empty where it has."""
    missing: list[int] = []
    for rank in range(1, size):
        try:
            came = _came(store, f"{prefix}/{rank}", until)
        except RuntimeError as e:
            return f"[Rank 0]: monitoredBarrier failed while it waited for rank {rank}: {e}"
        if not came:
            missing.append(rank)
            if not wait_all_ranks:
                break
    if not missing:
        return ""
    names = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    return f"[Rank 0]: {names} failed to pass monitoredBarrier in {milliseconds} ms"


def _await_rank_0(store: Store, key: str, until: float, milliseconds: int) -> str:
    """Rank 0's answer, or why there is none."""
    try:
        if _came(store, key, until):
            return store.get(key).decode()
    except RuntimeError as e:
        return str(e)
    return f"no answer in {milliseconds} ms"
