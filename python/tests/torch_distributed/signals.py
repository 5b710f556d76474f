"""Signals at the worst moments: Ctrl-C loses no memory and no end of a work, handlers may end the group. Two ranks."""

import collections
import dis
import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
import weakref
from datetime import timedelta

import by_name  # noqa: F401
import torch
import torch.distributed as dist

import paceline.torch as hvd
from paceline.common import abi
from paceline.common.engine import engine
from paceline.torch.distributed import exchanges, latest, memory, operations
from paceline.torch.distributed import work as work_module
from paceline.torch.distributed.callbacks import WorkFuture

HANG_S = 600
LIBRARY = abi.library()
submit = LIBRARY.submit


def blocking(tensor):
    """The work of an all_reduce whose caller waits next."""
    options = dist.AllreduceOptions()
    if hasattr(options, "asyncOp"):  # not in PyTorch 2.7
        options.asyncOp = False
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).allreduce([tensor], options)


def once(call, *instead):
    """A function that receives a signal before its first call on the main thread, or after where `instead` is given."""
    left = [signal.SIGINT]

    def interrupted(*args, **kwargs):
        if not instead and left and threading.current_thread() is threading.main_thread():
            signal.raise_signal(left.pop())
        result = call(*args, **kwargs)
        if instead and left:
            signal.raise_signal(left.pop())  # one that comes while C runs is handled when it has returned
        return result

    return interrupted


def eventually(holds, otherwise):
    """Waits until it holds."""
    until = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < until, otherwise
        time.sleep(0.001)  # nobody tells of it: how often it is looked at


class Hosts:
    """Notes the engine's memory of what is called in a with block, and whether it is gone."""

    def __enter__(self):
        self.gone = []
        self._init = memory.Memory.__init__

        def noted(m, *args, **kwargs):
            self._init(m, *args, **kwargs)
            gone = threading.Event()
            weakref.finalize(m.host, gone.set)
            self.gone.append(gone)

        memory.Memory.__init__ = noted
        return self

    def __exit__(self, *_):
        memory.Memory.__init__ = self._init


def interrupt(call):
    """Calls it. Returns whether Ctrl-C came."""
    try:
        call()
    except KeyboardInterrupt:
        return True
    return False


def memory_of_interrupted_calls(rank, store):
    """The engine may write until the other rank has come, and not longer is the memory kept."""
    receives = {
        "blocking": lambda: dist.broadcast(torch.zeros(4, 2).t(), 1),
        "asynchronous": lambda: dist.broadcast(torch.zeros(4, 2).t(), 1, async_op=True),
    }
    for name, receive in receives.items():
        if rank == 0:
            with Hosts() as hosts:
                LIBRARY.submit = once(submit, "after")
                assert interrupt(receive), name
                LIBRARY.submit = submit
            gc.collect()
            assert [gone.is_set() for gone in hosts.gone] == [False], name
            store.set(name, "interrupted")
        else:
            store.get(name)
            dist.broadcast(torch.ones(2, 4), 1)
        dist.barrier()
        if rank == 0:
            dist.all_reduce(torch.ones(1))  # looks at what is left behind
            dist.all_reduce(torch.ones(1))
            assert hosts.gone[0].wait(HANG_S), name
        else:
            dist.all_reduce(torch.ones(1))
            dist.all_reduce(torch.ones(1))


def memory_of_interrupted_calls_of_hvd(rank, store):
    for name in "first", "second":  # which is started again
        tensor = torch.ones(1000)
        if rank == 0:
            kept = weakref.ref(tensor.untyped_storage())
            LIBRARY.submit = once(submit, "after")
            assert interrupt(lambda tensor=tensor: hvd.allreduce_async_(tensor, name="x"))
            LIBRARY.submit = submit
            del tensor
            gc.collect()
            assert kept() is not None, name
            store.set(f"hvd {name}", "interrupted")
        else:
            store.get(f"hvd {name}")
            hvd.allreduce_(tensor, name="x")
        dist.barrier()


def ends_of_interrupted_waits(rank):
    """A second wait returns, with the outputs, and later callbacks of the group are called."""
    for make in blocking, lambda tensor: dist.all_reduce(tensor, async_op=True):
        for place, name in (memory.Memory, "store"), (WorkFuture, "complete"):
            function = getattr(place, name)
            for _ in range(10):  # the library's thread may be the first
                tensor = torch.ones(4, 2).t()
                setattr(place, name, once(function) if rank == 0 else function)
                work = make(tensor)
                if interrupt(work.wait):
                    work.wait()
                setattr(place, name, function)
                assert torch.equal(tensor, torch.full((2, 4), 2.0)), (name, tensor)
                called = threading.Event()
                work.get_future().add_done_callback(lambda _, called=called: called.set())
                assert called.wait(HANG_S), name


def ends_of_waits_that_a_slow_handler_interrupts(rank):
    """The library's thread has left the end to the one that waited, and the future gets its value all the same."""

    def slow(*_):
        time.sleep(0.3)
        raise KeyboardInterrupt

    before, store = signal.signal(signal.SIGINT, slow), memory.Memory.store
    for _ in range(10):
        tensor = torch.ones(4, 2).t()
        work = dist.all_reduce(tensor, async_op=True)
        memory.Memory.store = once(store) if rank == 0 else store
        interrupt(work.wait)
        memory.Memory.store = store
        future, called = work.get_future(), threading.Event()
        future.add_done_callback(lambda _, called=called: called.set())
        assert called.wait(HANG_S)
        assert torch.equal(tensor, torch.full((2, 4), 2.0)), tensor
    signal.signal(signal.SIGINT, before)


def outputs_of_interrupted_ends(rank):
    """They come again, though the engine gives what it has allocated once."""
    parts = [torch.zeros(3), torch.zeros(3)]
    options = torch._C._distributed_c10d.AllgatherOptions()
    if not hasattr(options, "asyncOp"):  # in PyTorch 2.7 the library's thread may be the first
        return
    options.asyncOp = False
    flat = exchanges.flat
    exchanges.flat = operations.flat = once(flat) if rank == 0 else flat
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    work = backend.allgather([parts], [torch.ones(3)], options)
    assert interrupt(work.wait) == (rank == 0)
    work.wait()
    assert all(torch.equal(part, torch.ones(3)) for part in parts), parts
    exchanges.flat = operations.flat = flat


def handlers_that_wait_within_ends(rank):
    """Both have the outputs: the handler's wait, and the one that it has come into."""
    result, works = engine.result, []
    signal.signal(signal.SIGINT, lambda *_: [work.wait() for work in works])
    for place in "before", "after":
        for receives in True, False:
            for _ in range(20):
                x, given = torch.zeros(4), torch.full((4,), 3.0)
                sends = dist.isend(given, 1 - rank)
                engine.result = once(result, *["after"] * (place == "after"))
                work = dist.irecv(x, 1 - rank) if receives else dist.all_to_all_single(x, given, async_op=True)
                works.append(work)
                work.wait()
                engine.result = result
                works.clear()
                sends.wait() if receives else dist.recv(torch.zeros(4), 1 - rank)
                assert torch.equal(x, given), (place, receives, x)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def handlers_that_call_within_calls(alone):
    """The program's work is its own: it completes."""
    signal.signal(signal.SIGINT, lambda *_: dist.all_reduce(torch.ones(2), group=alone))
    started = latest.started
    latest.started = once(started, "after")
    work = dist.all_reduce(torch.ones(4), async_op=True)
    eventually(work.is_completed, "the program has another work")
    latest.started = started
    signal.signal(signal.SIGINT, signal.default_int_handler)


def handlers_that_wait_for_callbacks_within_calls(alone):
    """A callback begins an operation while the handler waits for it, within a call of its own group."""
    for _ in range(3):
        future = dist.all_reduce(torch.ones(2), group=alone, async_op=True).get_future()
        ready = threading.Event()

        def begin(_, ready=ready):
            ready.wait()
            return dist.all_reduce(torch.ones(3), group=alone, async_op=True)

        begun = future.then(begin)
        signal.signal(signal.SIGINT, lambda *_, ready=ready, begun=begun: (ready.set(), begun.wait()))
        LIBRARY.submit = once(submit, "after")
        dist.all_reduce(torch.ones(8), group=alone)
        LIBRARY.submit = submit
        assert begun.done()
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Place:
    """Ctrl-C at the n-th place in the package's code at which Python handles signals."""

    AFTER = "RESUME", "CALL", "CALL_KW", "CALL_FUNCTION", "CALL_FUNCTION_KW", "CALL_FUNCTION_EX", "CALL_METHOD"

    def __init__(self, n):
        self.left, self.where, self._last = n, None, {}

    def __call__(self, frame, event, _):
        if f"{os.sep}paceline{os.sep}" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            before, self._last[frame] = self._last.get(frame), dis.opname[frame.f_code.co_code[frame.f_lasti]]
            self.left -= before in self.AFTER
            if self.left == 0 and self.where is None:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self

    def interrupts(self, call):
        """Calls it. Returns whether there was such a place."""
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        return self.where is not None


def calls_that_are_interrupted_at_each_place(rank, alone):
    """They leave no work behind."""
    for call in (
        lambda: dist.all_reduce(torch.ones(3, 2).t(), group=alone, async_op=True),
        lambda: dist.all_reduce(torch.ones(3, 2).t(), group=alone),
        lambda: dist.broadcast(torch.ones(3, 2).t(), rank, group=alone, async_op=True).wait(),
    ):
        for n in itertools.count(1):
            place = Place(n)
            if not place.interrupts(call):
                assert n > 20, n
                break
            eventually(lambda: not work_module._watched._works, f"a work is kept, interrupted at {place.where}")
    dist.barrier()


def signals_at_any_time(rank):
    """Handlers that raise, while works are started and waited for."""

    armed = []

    def ends(*_):
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, ends)
    seen = collections.Counter()
    for i in range(400):
        tensor = torch.ones(100, 64).t()
        work = dist.all_reduce(tensor, async_op=True) if i % 2 else blocking(tensor)
        if rank == 0:

            def wait(work=work):
                armed.append(True)
                signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-6, 6e-4))
                work.wait()
                armed.clear()

            seen[interrupt(wait)] += 1
        work.wait()
        assert tensor[0, 0] == 2, (i, tensor)
    assert rank or seen[True], "no signal has come in time"


def leaves_in_a_handler(rank):
    """As on SIGTERM: the group is destroyed within a call of its own."""

    def leave(*_):
        dist.destroy_process_group()
        print(f"rank {rank} is done\n", end="", flush=True)
        os._exit(0)

    signal.signal(signal.SIGINT, leave)
    LIBRARY.submit = once(submit, "after")
    while True:
        for work in [dist.all_reduce(torch.ones(200), async_op=True) for _ in range(8)]:
            try:
                work.wait()
            except dist.DistBackendError:
                return  # the other rank has left; here the signal comes in the next call


def main():
    dist.init_process_group("paceline", timeout=timedelta(seconds=HANG_S))
    hvd.init()
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    memory_of_interrupted_calls(rank, store)
    memory_of_interrupted_calls_of_hvd(rank, store)
    ends_of_interrupted_waits(rank)
    ends_of_waits_that_a_slow_handler_interrupts(rank)
    outputs_of_interrupted_ends(rank)
    handlers_that_wait_within_ends(rank)
    alone = [dist.new_group([i]) for i in range(2)][rank]
    handlers_that_call_within_calls(alone)
    handlers_that_wait_for_callbacks_within_calls(alone)
    calls_that_are_interrupted_at_each_place(rank, alone)
    signals_at_any_time(rank)
    leaves_in_a_handler(rank)


if __name__ == "__main__":
    main()
