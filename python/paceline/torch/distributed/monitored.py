"""monitored_barrier: through the store, so that it works where the engine's operations do not."""

from __future__ import annotations

import time
from datetime import timedelta

from torch._C._distributed_c10d import Store

from paceline.common.engine import engine
from paceline.torch.distributed.group import Group

_OK = "ok"
_LOOK_S = 0.5  # how often to look whether a rank is lost


def monitored_barrier(store: Store, group: Group, timeout: timedelta, wait_all_ranks: bool) -> None:
    """Waits until rank 0 has heard of all ranks. Raises RuntimeError, on rank 0 with the ranks that did not come.

    wait_all_ranks: rank 0 waits for all and names all that did not come, instead of the first.
    """
    prefix = f"monitored/{engine.round}/{group.next_barrier()}"  # a store may outlive a world
    if group.rank > 0:
        store.set(f"{prefix}/{group.rank}", _OK)
        _await_rank_0(store, f"{prefix}/0", group, timeout)
        return
    until, missing = time.monotonic() + timeout.total_seconds(), []
    milliseconds = round(1000 * timeout.total_seconds())
    if timeout <= timedelta(0):
        raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {milliseconds} ms.")
    for rank in range(1, group.size):
        try:
            _wait(store, f"{prefix}/{rank}", until)
        except RuntimeError:
            missing.append(rank)
            if not wait_all_ranks:
                break
    if not missing:
        store.set(f"{prefix}/0", _OK)
        return
    names = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    lost = engine.failure()
    text = f"[Rank 0]: {names} failed to pass monitoredBarrier in {milliseconds} ms" + (f": {lost}" if lost else "")
    store.set(f"{prefix}/0", text)
    raise RuntimeError(text)


def _wait(store: Store, key: str, until: float) -> None:
    """Waits for a key. Raises RuntimeError when it is not there in time, the store has gone, or a rank is lost."""
    while True:
        began = time.monotonic()
        try:
            store.wait([key], timedelta(seconds=max(0.01, min(until - began, _LOOK_S))))
            return
        except RuntimeError:
            ended = time.monotonic()
            if ended >= until or ended - began < _LOOK_S / 2:  # the store has an error of its own
                raise
        if (lost := engine.failure()) is not None:
            raise RuntimeError(lost)


def _await_rank_0(store: Store, key: str, group: Group, timeout: timedelta) -> None:
    try:
        _wait(store, key, time.monotonic() + timeout.total_seconds())
        answer = store.get(key).decode()
    except RuntimeError as e:
        answer = str(e)
    if answer != _OK:
        raise RuntimeError(
            f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            f"from rank 0. Please check rank 0 logs for faulty rank.\n Original exception: \n{answer}"
        )
