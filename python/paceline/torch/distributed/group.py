"""A group of ranks: its operations in the engine match in the order of their calls; those of callbacks, too."""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _autograd

from paceline.common import abi
from paceline.common.engine import engine
from paceline.common.operation import PLAIN, Options, operation
from paceline.torch.distributed import work
from paceline.torch.distributed.callbacks import lane_name
from paceline.torch.distributed.memory import Memory
from paceline.torch.distributed.work import PacelineWork

# The job's codecs are for gradients (ddp.py): what else a script sums is exact.
# PyTorch pickles objects to tensors of uint8, with their lengths in tensors of int64: what only moves such tensors is
# authenticated on every connection.
_BYTES = Options(codec="none", authenticated=True)
_OF_OBJECTS = (abi.UINT8, abi.INT64)
_MESSAGES = (abi.SEND, abi.RECEIVE)
_MOVES = (abi.BROADCAST, abi.ALLGATHER, abi.ALLTOALL, *_MESSAGES)
# How many operations a group keeps to start them again: those of a training step, and more.
_PREPARED = 1024
# How many groups of the same ranks there were in a round of the engine's, by it and them, with those that failed.
_made: Counter[tuple[int, tuple[int, ...]]] = Counter()
# How many models have a codec's hook, by round of the engine and process set.
_models: Counter[tuple[int, int]] = Counter()


def forget() -> None:
    """Drops what was counted in earlier rounds of the engine's.

    In one round groups are counted on, also where another default group follows: what earlier ones have left open in
    the engine is under their numbers. Only the members of a group have to agree on those.
    """
    for key in [key for key in _made if key[0] != engine.round]:
        del _made[key]


class _Making(threading.local):
    """What one thread makes a group's operations with.

    A lock would be held where a signal's handler runs, which may wait for another thread that makes some.
    """

    def __init__(self) -> None:
        self.prepared: dict[Any, abi.Op] = {}
        self.active = False  # a handler may make some while its own thread does


class Group:
    """One process group, on this rank. ranks: of the job, in the group's order.

    name: PyTorch's, for people. Ranks may have different ones for one group: PyTorch numbers the groups that a rank
    has made, and after some with use_local_synchronization=True these are not as many on all. Members of a group agree
    on which of the groups of its ranks it is.
    """

    def __init__(self, name: str, title: str, ranks: Sequence[int], timeout: timedelta) -> None:
        self.name, self.title, self.ranks = name, title, list(ranks)
        self.size, self.rank = len(ranks), self.ranks.index(engine.rank())
        self.timeout_s = timeout.total_seconds()
        # The engine has the ranks of a set in ascending order: the place there of each rank of the group.
        ascending = sorted(self.ranks)
        self.places = [ascending.index(rank) for rank in self.ranks]
        self.ordered = self.places == list(range(self.size))
        key = engine.round, tuple(ascending)
        before = _made[key]
        _made[key] += 1
        self.count = 0  # calls so far
        self._collectives = 0  # operations of all ranks that the program itself has begun
        self._barriers = 0, 0  # how many were so at the last monitored barrier, and barriers there before it
        self.answered = ""  # rank 0: where its answer at the last monitored barrier is, in the store
        self._closed = threading.Event()
        self.number = 0 if self.size == engine.size() else engine.find_process_set(self.ranks)
        self.key = f"{self.number}.{before}"  # the same on all ranks
        self._of_messages = f"messages of {self.key}"
        self._sequence = f"torch.distributed.{self.key}".encode()
        self._tag = zlib.crc32(self._sequence) << 32  # groups of the same ranks have tags of their own
        self._making = _Making()

    def op(
        self,
        kind: int,
        shape: tuple[int, ...],
        dtype: int,
        input: int,
        output: int,
        reduce_op: int = 0,
        root: int = 0,
        prescale: float = 1.0,
        splits: Sequence[int] | None = None,
        tag: int = 0,
    ) -> abi.Op:
        """An operation of this group. root: a rank of the group, or ANY_RANK."""
        lane, prepared = lane_name(), self._making.prepared
        if not lane and kind not in _MESSAGES:
            self._collectives += 1
        key = (kind, shape, dtype, reduce_op, root, prescale, tag, lane)
        op = prepared.get(key) if splits is None else None
        if op is None:
            op = operation(
                kind,
                dtype,
                shape,
                0,
                0,
                reduce_op=reduce_op,
                process_set=self.number,
                root=root if root == abi.ANY_RANK else self.ranks[root],
                prescale=prescale,
                splits=splits,
                options=_BYTES if dtype in _OF_OBJECTS and kind in _MOVES else PLAIN,
            )
            if kind in _MESSAGES:
                op.tag = self._tag | tag
                op.name = f"tag {tag} of group {self.name!r}".encode()
            else:
                op.name, op.sequence = self._sequence + lane.encode(), 1
            if splits is None:
                if len(prepared) >= _PREPARED:
                    prepared.clear()
                prepared[key] = op
        op.input, op.output = input or None, output or None
        return op

    def run(
        self,
        what: str,
        make: Callable[[], abi.Op | list[abi.Op]],
        memory: Sequence[Memory | torch.Tensor],
        finish: Callable[[Any], None] | None,
        outputs: Any,
        options: Any,
    ) -> PacelineWork:
        """Starts a call. make: its operations."""
        wait = getattr(options, "timeout", None)
        limit = wait.total_seconds() if wait is not None and wait > timedelta(0) else self.timeout_s
        making = self._making
        active, prepared = making.active, making.prepared
        try:
            making.active = True
            if active:  # those are about to be started
                making.prepared = {}
            self.count += 1
            tell = bool(getattr(options, "asyncOp", True))
            return self._start(f"{what} number {self.count}", what, make(), memory, finish, outputs, limit, tell)
        finally:
            making.prepared, making.active = prepared, active

    def start(
        self,
        what: str,
        ops: list[abi.Op],
        memory: Sequence[Memory | torch.Tensor],
        finish: Callable[[Any], None] | None,
        outputs: Any,
    ) -> PacelineWork:
        """Starts operations that have names, which other ranks may start in another order."""
        return self._start(what, what, ops, memory, finish, outputs, self.timeout_s, True)

    def _start(
        self,
        what: str,
        title: str,
        ops: abi.Op | list[abi.Op],
        memory: Sequence[Memory | torch.Tensor],
        finish: Callable[[Any], None] | None,
        outputs: Any,
        limit: float,
        tell: bool,
    ) -> PacelineWork:
        what = f"{what} of group {self.name!r} on rank {self.rank}"
        # Messages match whatever their order, and may come late: no other callback waits for theirs.
        is_message = isinstance(ops, abi.Op) and ops.kind in _MESSAGES
        callbacks = self._of_messages if is_message else self.key
        started = PacelineWork(what, memory, finish, outputs, callbacks, self._closed)
        if _autograd._profiler_enabled():
            started.profile(f"{self.title}:{title}", [m.tensor for m in memory if isinstance(m, Memory)])
            tell = True
        array: Any = (abi.Op * len(ops))(*ops) if isinstance(ops, list) else ops
        count = len(ops) if isinstance(ops, list) else 1
        for op in array if isinstance(ops, list) else (ops,):
            op.timeout_ms, op.at_once = int(1000 * limit), not tell
            if not tell:
                op.done, op.done_arg = None, None
        started.start(array, count, tell)
        return started

    def next_barrier(self) -> str:
        """Where in the program the next monitored barrier is: after which operation of all ranks, and which one there.

        A rank that has missed one, which therefore failed, has the same place as the others again after an operation.
        """
        self.count += 1
        at, before = self._barriers
        self._barriers = self._collectives, before + 1 if at == self._collectives else 0
        return "{}.{}".format(*self._barriers)

    def next_model(self) -> str:
        """With what the names of one more model's gradients begin on all ranks."""
        _models[engine.round, self.number] += 1
        return f"ddp.{_models[engine.round, self.number]}"

    def close(self) -> None:
        """Ends the group, and its works in flight with an error."""
        work.close(self._closed)
