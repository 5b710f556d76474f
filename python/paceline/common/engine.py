"""Python's interface to the engine: one job per process, handles, and exceptions for status codes."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from paceline.common import abi
from paceline.common.exceptions import HorovodInternalError, NotInitializedError

# The part of the environment that names the job, this process's place in it, and its settings.
_ENV_PREFIXES = ("PACELINE_", "HOROVOD_", "DMLC_", "BYTEPS_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_")
_ENV_NAMES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "MASTER_ADDR",
        "MASTER_PORT",
        "HOSTNAME",
        "XDG_RUNTIME_DIR",
        "TMPDIR",
    }
)

# How long one wait stays in C, where Ctrl-C is not seen.
_WAIT_SLICE_MS = 100
_WAIT_SLICE = ctypes.c_int64(_WAIT_SLICE_MS)

_NOT_YET = 2**32 - 1  # rows of an output that has not been fetched

_T = TypeVar("_T")


class Engine:
    """The job of this process. The framework modules' `init`, `rank` and so on are its methods."""

    def __init__(self) -> None:
        self._job: dict[str, Any] | None = None
        self._pid = -1
        self.generation = 0  # counts inits and joins, each of which empties the servers
        self.last_joined: int | None = None  # the last rank of the round's last join
        self._sync_info: dict[str, dict[str, Any]] = {}
        self.round = 0  # counts inits, so that a handle of an earlier round is recognised
        self._fetched: dict[int, _Fetched] = {}  # by handle
        self._before_wait: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._before_rest: list[Callable[[], None]] = []
        self._before_checkpoint: list[Callable[[], None]] = []
        self._at_shutdown: list[Callable[[], None]] = []
        self._at_exit: list[tuple[Callable[[], Exception | None], Callable[[], Exception | None]]] = []
        self._join: Callable[[], None] | None = None  # joins the job whose place this process only expects yet

    # The job

    def init(
        self,
        process_sets: Iterable[Sequence[int]] = (),
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Joins the job that the environment names and waits for its other ranks. A second call does nothing.

        process_sets: ranks of the sets to register. settings: values by name, "sync" for PACELINE_SYNC; they override
        the environment. environment: variables that override the process's. Raises ValueError for wrong settings,
        HorovodInternalError if the job does not form in time. Ctrl-C ends the wait.
        """
        if self._job is not None and self._pid == os.getpid():
            return
        env = _environment() | dict(environment or {})
        sets = [list(ranks) for ranks in process_sets]
        text = json.dumps({"env": env, "settings": dict(settings or {}), "process_sets": sets})
        self._check(abi.library().pl_init(text.encode()))
        self.round += 1
        self.generation += 1
        self.last_joined = None
        self._pid = os.getpid()
        self._job = self._info()
        atexit.unregister(self.leave_at_exit)
        atexit.register(self.leave_at_exit)

    def expect(self, settings: Mapping[str, Any] | None, join: Callable[[], None]) -> None:
        """Takes the place that the environment names as that of a job which others train in without this process.

        `rank()`, `size()` and the settings are known from now on. What needs other ranks calls join first, which calls
        `init`. Raises ValueError for wrong settings.
        """
        text = json.dumps({"env": _environment(), "settings": dict(settings or {}), "expect": True})
        self._check(abi.library().pl_init(text.encode()))
        self._pid, self._job, self._join = os.getpid(), self._info(), join

    def arrive(self) -> None:
        """Joins the job whose place this process only expects yet."""
        if self._join is not None:
            join, self._join, self._job = self._join, None, None
            join()

    def seat(self, process: int, ask: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Asks the launcher of a job that changes its size, as pl_seat says, and waits for the answer.

        Raises HorovodInternalError if the launcher refuses, or does not answer in time.
        """
        request = {"env": _environment(), "timeout_seconds": timeout_s, "ask": {"process": process, **ask}}
        buffer = ctypes.create_string_buffer(1 << 16)
        lib, text = abi.library(), json.dumps(request).encode()

        def call() -> int:
            return self._check(lib.pl_seat(text, buffer, len(buffer)))

        length = interruptible(call) if threading.current_thread() is threading.main_thread() else call()
        return json.loads(buffer.raw[:length])

    def shutdown(self) -> None:
        """Leaves the job. Operations in flight end with HorovodInternalError. Does nothing without a job."""
        if self._job is None or self._pid != os.getpid():
            return
        failure = None
        try:
            self.rest()
        except HorovodInternalError as e:
            warnings.warn(f"shutdown() waited for what was in flight, which failed: {e}", stacklevel=3)
        except (RuntimeError, ValueError) as e:  # of the program, which is raised when the job has ended
            failure = e
        job, self._job, self._join = self._job, None, None
        try:
            interruptible(lambda: self._check(abi.library().pl_shutdown()))
        except Exception:  # refused, in a function that the library calls: the job goes on
            self._job = job
            raise
        self._fetched.clear()
        for call in self._at_shutdown:
            call()
        if failure is not None:
            raise failure

    def before_wait(self, call: Callable[[], None]) -> None:
        """Has a method be called before each wait, as long as its object lives: it submits what it has collected."""
        # Those whose objects have ended go here, not in a callback: WeakMethod fails where the class ends with it.
        alive = [ref for ref in self._before_wait if ref() is not None]
        self._before_wait = [*alive, weakref.WeakMethod(call)]

    def _submit_collected(self) -> None:
        for ref in self._before_wait:
            if (call := ref()) is not None:
                call()

    def before_rest(self, call: Callable[[], None]) -> None:
        """Has `call` be called before each shutdown and checkpoint: it waits for what it has in flight."""
        self._before_rest.append(call)

    def rest(self) -> None:
        """Waits for what frameworks have in flight. Raises HorovodInternalError where that fails."""
        for call in self._before_rest:
            call()

    def before_checkpoint(self, call: Callable[[], None]) -> None:
        """Has `call` be called before each checkpoint alone."""
        self._before_checkpoint.append(call)

    def at_shutdown(self, call: Callable[[], None]) -> None:
        """Has `call` be called at the end of each shutdown, when no operation uses memory any more."""
        self._at_shutdown.append(call)

    def at_exit(self, finish: Callable[[], Exception | None], drain: Callable[[], Exception | None]) -> None:
        """For a process that ends without shutdown, where a framework has operations in flight that nobody waits for.

        finish waits for them before the shutdown, not where an exception ends the process: then other ranks may wait
        for what comes no more. drain ends them after it. Both return what failed; Ctrl-C ends the wait.
        """
        self._at_exit.append((finish, drain))

    def leave_at_exit(self) -> None:
        """Leaves the job as the process ends."""
        if self._job is None or self._pid != os.getpid():
            return
        ends_well, failures = not hasattr(sys, "last_value"), []
        if ends_well:
            with suppress(KeyboardInterrupt):
                failures += [finish() for finish, _ in self._at_exit]
        self._job = None
        for stream in sys.stdout, sys.stderr:
            with suppress(Exception):  # None, broken or closed, or the program's own
                stream.flush()
        with _ended_by_ctrl_c():  # the server in this process may stay for others
            abi.library().pl_shutdown()
        failures += [drain() for _, drain in self._at_exit]
        if ends_well and (failure := next(filter(None, failures), None)):
            message = f"what was in flight at the end of the process failed: {failure}"
            warnings.warn(message, stacklevel=1)

    def is_initialized(self) -> bool:
        """Whether `init()` has been called and `shutdown()` has not."""
        return self._job is not None

    def runs(self, number: int) -> bool:
        """Whether the job of that round still runs."""
        return number == self.round and self._job is not None

    def rank(self) -> int:
        """This process's number among all workers, from 0. Raises ValueError before `init()`."""
        return self._known("rank")

    def size(self) -> int:
        """The number of workers. Raises ValueError before `init()`."""
        return self._known("size")

    def local_rank(self) -> int:
        """This process's number among the workers of its host. Raises ValueError before `init()`."""
        return self._known("local_rank")

    def local_size(self) -> int:
        """The number of workers on this host. Raises ValueError before `init()`."""
        return self._known("local_size")

    def cross_rank(self) -> int:
        """This host's number among the hosts that have this local rank. Raises ValueError before `init()`."""
        return self._known("cross_rank")

    def cross_size(self) -> int:
        """The number of hosts that have this local rank. Raises ValueError before `init()`."""
        return self._known("cross_size")

    def job_round(self) -> int:
        """The job's number of this round: all ranks have it, and no other round. Raises ValueError before `init()`."""
        return self._known("round")

    def is_homogeneous(self) -> bool:
        """Whether every host has as many workers as any other. Raises ValueError before `init()`."""
        return self._known("homogeneous")

    def _known(self, what: str) -> Any:
        if self._job is None:
            raise NotInitializedError()
        if what not in self._job:
            self.arrive()
        return self._job[what]

    def _info(self) -> dict[str, Any]:
        self.arrive()
        lib = abi.library()
        return json.loads(_text(lambda buf, room: self._check(lib.pl_info(buf, room))))

    def tally(self) -> dict[str, int]:
        """The counts of the server in this process since its tensors were declared, per partition.

        Pushes: "admitted", "dropped" because they were late, "duplicate". Pulls: "delayed" by a synchronisation model,
        "withheld" because too little had changed (`pull_gate`). All are zero in a process without a server.
        """
        return self._info()["tally"]

    def supersteps(self) -> list[dict[str, Any]]:
        """This rank's progress in each group of values under a model with supersteps.

        "value": the group's first value, "model", "superstep": its number, "iterations": those of this rank in it so
        far, and for Adaptive "s" and "w": the thresholds of the newest barrier (0 before the first).
        """
        return self._info()["supersteps"]

    def failure(self) -> str | None:
        """Why no operation can begin any more, for example a lost rank; None while all is well."""
        return self._info().get("failure")

    # Process sets

    def process_sets(self) -> dict[int, list[int]]:
        """The registered sets: sorted ranks by number."""
        return {s["id"]: s["ranks"] for s in self._info()["process_sets"]}

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Registers a set and returns its number. Raises ValueError for ranks that are not in the job."""
        return self._process_set(abi.library().pl_process_set_add, ranks)

    def find_process_set(self, ranks: Sequence[int]) -> int:
        """The number of the set of these ranks, which is made if there is none, whatever the other ranks do."""
        return self._process_set(abi.library().pl_process_set_find, ranks)

    def _process_set(self, ask: Any, ranks: Sequence[int]) -> int:
        self.arrive()
        number = ctypes.c_uint32()
        members = (ctypes.c_int32 * len(ranks))(*(abi.int32(rank, "rank") for rank in ranks))
        interruptible(lambda: self._check(ask(members, len(ranks), ctypes.byref(number))))
        return number.value

    def remove_process_set(self, number: int) -> None:
        """Removes a registered set."""
        lib = abi.library()
        interruptible(lambda: self._check(lib.pl_process_set_remove(number)))

    # Operations

    def submit(self, ops: Sequence[abi.Op], handles: Any) -> None:
        """As `submit_into`, for operations that are not in an array."""
        count = len(ops)
        self.submit_into(ops[0] if count == 1 else (abi.Op * count)(*ops), count, handles)

    def submit_into(self, ops: Any, count: int, handles: Any) -> None:
        """Starts operations in an array as one group, all or none. Writes their handles to an array of the caller's.

        Ctrl-C may come when they have started: then there are handles (abi.no_handles), and the memory must stay.
        """
        status = abi.library().submit(ctypes.byref(ops), count, ctypes.byref(handles))
        if status < 0:
            self._check(status)

    def setting(self, name: str) -> Any:
        """A setting of the job, such as "sync" for PACELINE_SYNC. Raises ValueError before `init()`."""
        return self._known("settings")[name]

    def check_sync(self, sync: str, soft_park: bool, accumulate: bool, workers: int) -> None:
        """Raises ValueError, which says what is allowed, for a model that so many workers cannot run."""
        options = abi.Sync(ctypes.sizeof(abi.Sync), soft_park, sync.encode())
        self._check(abi.library().pl_check_sync(ctypes.byref(options), accumulate, workers))

    def sync_info(self, sync: str) -> dict[str, Any]:
        """The properties of a synchronisation model, as pl_sync_info names them.

        Raises ValueError, which lists the models, for a text that names none.
        """
        info = self._sync_info.get(sync)
        if info is None:
            lib = abi.library()
            info = json.loads(_text(lambda buf, room: self._check(lib.pl_sync_info(sync.encode(), buf, room))))
            self._sync_info[sync] = info
        return info

    def check_codec(self, codec: str) -> None:
        """Raises ValueError, which says what is allowed, for a text that is no codec, no rules and no path of rules."""
        self._check(abi.library().pl_check_codec(codec.encode()))

    def codec_info(self, codec: str) -> list[dict[str, Any]]:
        """The properties of the codec of each rule, as pl_codec_info names them. Raises as `check_codec` does."""
        lib = abi.library()
        return json.loads(_text(lambda buf, room: self._check(lib.pl_codec_info(codec.encode(), buf, room))))

    def compression_state(self) -> bytes:
        """The state of coded tensors for a checkpoint: iterations, and residuals of this rank and the servers.

        Every rank saves its own, at the same place in the program, with no operation in flight.
        """
        self.arrive()
        self.rest()
        self._submit_collected()
        for call in self._before_checkpoint:
            call()
        lib = abi.library()
        return _read(lambda buf, room: self._check(lib.pl_state(buf, room)))

    def load_compression_state(self, state: bytes) -> None:
        """Restores what `compression_state` returned on this rank, on every rank. Raises ValueError for other bytes."""
        self.arrive()
        self._check(abi.library().pl_set_state(state, len(state)))

    def set_condition(self, change: dict[str, Any]) -> int:
        """Changes synchronisation models while training runs. Returns the iteration from which the change applies."""
        self.arrive()
        at = ctypes.c_uint64()
        lib, text = abi.library(), json.dumps(change).encode()
        interruptible(lambda: self._check(lib.pl_set_condition(text, ctypes.byref(at))))
        return at.value

    def end_iteration(self, process_set: int, group: str) -> bool:
        """Ends an iteration of a group of values under a model with supersteps.

        Returns whether the superstep ends with it, so that the rank waits for the others now.
        """
        last = ctypes.c_int32()
        self._check(abi.library().pl_end_iteration(process_set, group.encode(), ctypes.byref(last)))
        return bool(last.value)

    def begin_iteration(self, process_set: int, group: str) -> None:
        """Begins the next iteration. The time since `end_iteration` is not part of one."""
        self._check(abi.library().pl_begin_iteration(process_set, group.encode()))

    def submit_join(self) -> int:
        """Reports that this rank has no more data. Returns a handle whose result has as value the last rank to join."""
        self.arrive()
        self._submit_collected()
        handle = ctypes.c_int32()
        self._check(abi.library().pl_join(None, None, ctypes.byref(handle)))
        self.generation += 1
        return handle.value

    def last_to_join(self, handle: int) -> int:
        """The result of a join that has ended."""
        self.last_joined = self.result(handle)[2]
        return self.last_joined

    def ended(self, handle: int) -> bool:
        """Whether the operation has ended, successfully or not."""
        self._submit_collected()
        return abi.library().poll(handle) != abi.PENDING

    def wait(self, handles: Sequence[int]) -> BaseException | None:
        """Waits until all have ended and returns the first error, if any. Ctrl-C ends the wait.

        It releases none of them: Ctrl-C may come when C has returned, and then somebody waits again.
        """
        self._submit_collected()
        return self.end_of(handles)

    def end_of(self, handles: Sequence[int]) -> BaseException | None:
        """As `wait`, of operations that end without what optimizers have collected, or have ended."""
        lib, array, count = abi.library(), _array(handles), len(handles)
        reference = ctypes.byref(array)
        while (status := lib.wait_all(reference, count, _WAIT_SLICE)) == abi.ERR_TIMEOUT:
            pass
        if status >= 0:
            return None
        failed = next((h for h in array if lib.poll(h) == status), None)
        return _exception(status, _last_error() if failed is None else self._handle_error(failed))

    def result(self, handle: int) -> tuple[Any, list[int], int]:
        """(memory, rows, value) of an operation that is done.

        memory: the bytes that the engine allocated (allgather, alltoall), as a ctypes array that frees them with its
        last reference, or None where there are none. rows: the number of rows from each rank of the set. The same again
        until the handle is released.
        """
        fetched = self._fetched.get(handle) or self._fetched.setdefault(handle, _Fetched())
        out = fetched.out
        if out.nrows == _NOT_YET:
            status = abi.library().pl_result(handle, ctypes.byref(out))
            if out.nrows == _NOT_YET:  # else a signal's handler may have come between
                self._fetched.pop(handle, None)  # the handler's may have failed, too
                self._check(status)
        memory = None
        if out.data:
            memory = (ctypes.c_char * out.bytes).from_address(out.data)
            memory.fetched = fetched
        return memory, out.rows[: out.nrows] if out.nrows else [], out.value

    def arena(self, count: int) -> Any:
        """So many zeros that the servers of this host use in place, freed with the last reference; else None."""
        lib = abi.library()
        at = lib.pl_arena_alloc(count)
        if not at:
            return None
        memory = (ctypes.c_char * count).from_address(at)
        weakref.finalize(memory, lib.pl_arena_free, at).atexit = False
        return memory

    def release(self, handles: Sequence[int]) -> None:
        """Releases the handles of operations that have ended."""
        if self._fetched:
            for handle in handles:
                self._fetched.pop(handle, None)
        abi.library().release_all(ctypes.byref(_array(handles)), len(handles))

    def _handle_error(self, handle: int) -> str:
        lib = abi.library()
        return _text(lambda buf, room: lib.pl_error(handle, buf, room)) or _last_error()

    # The timeline

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Writes a Chrome trace of each rank's operations: rank 0 to trace.json, rank 1 to trace.1.json, and so on.

        mark_cycles: Horovod's, without effect: there are no negotiation cycles. Raises ValueError before `init()`, and
        if the file cannot be written.
        """
        self._known("rank")
        self.arrive()
        self._check(abi.library().pl_timeline_start(os.fsencode(file_path)))

    def stop_timeline(self) -> None:
        """Ends the trace and closes its file. Raises ValueError before `init()`."""
        self._known("rank")
        self.arrive()
        self._check(abi.library().pl_timeline_stop())

    def last_error(self, status: int) -> BaseException:
        """What a call on this thread returned a status for."""
        return _exception(status, _last_error())

    def _check(self, status: int) -> int:
        if status < 0:
            raise _exception(status, _last_error())
        return status


engine = Engine()


class _Fetched:
    """What an operation's output is written to, and who frees it. The engine gives it once; Ctrl-C may come then."""

    def __init__(self) -> None:
        self.out = abi.Output(size=ctypes.sizeof(abi.Output), nrows=_NOT_YET)
        weakref.finalize(self, _free, self.out).atexit = False


def _free(out: abi.Output) -> None:
    if out.data:
        abi.library().pl_free(out.data)


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k in _ENV_NAMES or k.startswith(_ENV_PREFIXES)}


def _array(handles: Sequence[int]) -> Any:
    return handles if isinstance(handles, ctypes.Array) else (ctypes.c_int32 * len(handles))(*handles)


def _exception(status: int, message: str) -> BaseException:
    if status == abi.ERR_NOT_INITIALIZED:
        return NotInitializedError(message) if message else NotInitializedError()
    if status in (abi.ERR_INVALID, abi.ERR_DUPLICATE):
        return ValueError(message)
    if status == abi.ERR_INTERRUPTED:
        return KeyboardInterrupt()
    return HorovodInternalError(message or f"the engine failed with status {status}")


def _last_error() -> str:
    message = abi.library().pl_last_error()
    return message.decode(errors="replace") if message else ""


def _text(read: Callable[[Any, int], int]) -> str:
    return _read(read).decode(errors="replace")


def _read(read: Callable[[Any, int], int]) -> bytes:
    """What C writes into a buffer, without a final NUL. Calls again with more room until it fits."""
    room = 4096
    while True:
        buffer = ctypes.create_string_buffer(room)
        length = read(buffer, room)
        if length < room:
            return bytes(memoryview(buffer)[: max(length, 0)])
        room = length + 1


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Has Ctrl-C end the process, where Python would raise KeyboardInterrupt: for a long call at the process's end.

    There CPython 3.12 starts no thread, which `interruptible` needs.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interruptible(call: Callable[[], _T]) -> _T:
    """Runs a call that may stay in C for long on a thread of its own, so that the main thread receives Ctrl-C.

    Returns and raises what the call does.
    """
    engine._submit_collected()
    if threading.current_thread() is not threading.main_thread():
        return call()
    results: list[_T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=run, name="paceline", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # CPython 3.12 starts none where the interpreter ends
        return call()
    while thread.is_alive():
        thread.join(_WAIT_SLICE_MS / 1000)
    if failures:
        raise failures[0]
    return results[0]
