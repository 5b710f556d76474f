"""A job's life in its processes: init and shutdown, again and again, Ctrl-C, fork and threads."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import HANG_S, Job, script, wait_until_printed

from paceline.common.engine import _environment


def ends_well_alone(code):
    """Runs it in a process that no launcher started, which prints nothing."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, *code], env=env, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_process_alone_is_a_job_of_one(tmp_path):
    code = script("""
        for ask in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size,
                    hvd.stop_timeline, lambda: hvd.start_timeline("x"), hvd.global_process_set.included):
            try:
                ask()
                raise SystemExit(f"{ask} answered before init()")
            except ValueError as e:
                assert "call hvd.init() first" in str(e), e
        for operation in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter, lambda t: hvd.broadcast(t, 0),
                          lambda _: hvd.barrier(), lambda _: hvd.join()):
            try:
                operation(torch.ones(1))
                raise SystemExit("an operation was accepted before init()")
            except hvd.HorovodInternalError as e:
                assert isinstance(e, ValueError) and "init" in str(e), e
        assert not hvd.is_initialized()
        hvd.shutdown()
        hvd.init()
        assert hvd.is_initialized() and (hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_size()) == (0, 1, 1, 1)
        x = torch.rand(5)
        assert torch.equal(hvd.allreduce(x), x) and torch.equal(hvd.allgather(x), x) and hvd.join() == 0
        assert torch.equal(hvd.alltoall(x, [5])[0], x) and torch.equal(hvd.reducescatter(x), x)
        assert hvd.allgather_object("a") == ["a"]
        hvd.shutdown()
        assert not hvd.is_initialized()
    """)
    ends_well_alone(code)


def test_the_job_is_left_where_no_thread_can_start():
    """CPython 3.12 starts none in handlers of atexit."""
    code = script("""
        import threading

        def start(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        hvd.init()
        threading.Thread.start = start
        hvd.shutdown()
        assert not hvd.is_initialized()
    """)
    ends_well_alone(code)


def test_init_and_shutdown_hundreds_of_times(tmp_path):
    code = script("""
        import threading
        for i in range(300):
            hvd.init()
            if i % 3 == 0:
                x = torch.full((10,), float(hvd.rank() + i))
                assert torch.equal(hvd.allreduce(x, op=hvd.Max), torch.full((10,), float(i + hvd.size() - 1)))
            if i % 50 == 7:
                stray = hvd.allreduce_async(torch.ones(3), name=f"only rank {hvd.rank()}")  # ends with the round
            hvd.shutdown()
            if i % 50 == 7:
                try:
                    hvd.synchronize(stray)
                    raise SystemExit("an operation of an earlier round ended well")
                except hvd.HorovodInternalError as e:
                    assert "shutdown()" in str(e), e
            if i == 20:
                before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        after = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        assert after[0] <= before[0] + 10 and after[1] <= before[1] + 20, (before, after)
    """)
    with Job(2, code, tmp_path, fresh=True) as job:
        assert job.succeed() == ["", ""]


def test_nothing_is_printed_and_exit_without_shutdown_is_clean(tmp_path):
    with Job(
        3, script("hvd.init(); hvd.allreduce(torch.ones(100000)); hvd.allgather(torch.ones(2))"), tmp_path, fresh=True
    ) as job:
        assert job.succeed() == ["", "", ""]


def test_an_object_with_a_call_before_waits_ends_with_its_class_without_a_word():
    """At the end of the interpreter an optimizer ends together with its class."""
    code = script("""
        import gc
        from paceline.common.engine import engine

        def register():
            class Collects:
                pass

            Collects.instance = Collects()  # before the method: so the collector comes to it first

            def start(self):
                pass

            Collects.start = start
            engine.before_wait(Collects.instance.start)

        register()
        gc.collect()
        hvd.init()
        hvd.barrier()
    """)
    ends_well_alone(code)


@pytest.mark.parametrize("waits_in", ["an operation", "init", "a barrier", "join"])
def test_ctrl_c_breaks_off_a_wait_at_once(waits_in, tmp_path):
    wait = {
        "an operation": "hvd.allreduce(torch.ones(3))",
        "a barrier": "hvd.barrier()",
        "join": "hvd.join()",
        "init": "",
    }
    code = script(f"""
        if {waits_in == "init"} and int(os.environ["RANK"]) == 1:
            print("ready", flush=True)
            time.sleep(1000)  # until Ctrl-C
        print("ready", flush=True)
        hvd.init()
        print("initialized", flush=True)
        if hvd.rank() == 1:
            time.sleep(1000)  # until Ctrl-C
        {wait[waits_in]}
    """)
    # Who waits for its end instead waits for longer than the test does.
    with Job(2, code, tmp_path, fresh=True, PACELINE_START_TIMEOUT=str(2 * HANG_S)) as job:
        wait_until_printed(job, "ready" if waits_in == "init" else "initialized")
        time.sleep(0.3)  # into the wait
        for process in job.processes:
            process.send_signal(signal.SIGINT)
        ended = job.wait()
    for end in ended:
        assert "KeyboardInterrupt" in end.output and "Fatal" not in end.output, end.output
        assert end.status in (1, 130, -signal.SIGINT)


def test_ctrl_c_ends_a_process_that_stays_for_others_after_its_script(tmp_path):
    code = script("""
        hvd.init()
        hvd.barrier()  # a server that no rank has reached does not stay
        if hvd.rank() == 1:
            time.sleep(1000)
    """)
    with Job(2, code, tmp_path, fresh=True, PACELINE_ELASTIC="1", PACELINE_STALL_WARNING="500ms") as job:
        wait_until_printed(job, "its server stays", [0])
        job.processes[0].send_signal(signal.SIGINT)
        deadline = time.monotonic() + 60
        while job.processes[0].poll() is None:
            assert time.monotonic() < deadline, "it stays"
            time.sleep(0.02)
        assert job.processes[0].poll() == -signal.SIGINT


def test_the_variables_of_every_launcher_reach_the_engine(monkeypatch):
    source = (Path(__file__).parents[2] / "node" / "settings" / "identity.go").read_text()
    table = source.partition("var launchers = ")[2].partition("\n}")[0]
    names = set(re.findall(r'"([A-Z_]{4,})"', table))
    assert {"PACELINE_RANK", "PMI_RANK", "MPI_LOCALRANKID", "SLURM_PROCID"} <= names
    for name in names:
        monkeypatch.setenv(name, "1")
    assert names <= set(_environment())


def test_a_forked_child_gets_a_clear_error_and_data_loaders_work(tmp_path):
    code = script("""
        class Numbers(torch.utils.data.Dataset):
            def __len__(self):
                return 40

            def __getitem__(self, i):
                return torch.full((100,), float(i)), hvd.rank()  # workers may ask for the rank

        hvd.init()
        hvd.allreduce(torch.ones(3))
        for epoch in range(2):
            for x, rank in torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2):
                assert (rank == hvd.rank()).all()
                hvd.allreduce(x)
        for operation in (lambda: hvd.allreduce(torch.ones(3)), hvd.barrier, hvd.init, hvd.join):
            child = os.fork()
            if child == 0:
                try:
                    operation()
                except hvd.HorovodInternalError as e:
                    os._exit(7 if "fork()" in str(e) else 1)
                os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        child = os.fork()
        if child == 0:
            hvd.shutdown()
            sys.exit(0)  # runs what is registered for the end of the process
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        hvd.barrier()
    """)
    with Job(2, code, tmp_path, fresh=True) as job:
        job.succeed()


def test_what_a_forked_child_writes_into_the_arena_is_its_own(tmp_path):
    """Elsewhere fork copies memory as well. The second round has another file behind the arena.
    Core dumps leave it out, as they do the parent's."""
    code = script("""
        def out_of_dumps():
            with open("/proc/self/smaps") as maps:
                arenas = maps.read().split("/memfd:paceline-arena")[1:]
            return arenas and all("dd" in a.partition("VmFlags:")[2].splitlines()[0].split() for a in arenas)

        for _ in range(2):
            hvd.init()
            x = hvd.zeros_in_arena(1000).fill_(1.5)
            hvd.allreduce_(x, op=hvd.Sum, name="in the arena")
            child = os.fork()
            if child == 0:
                same = (x == 3).all()
                x.fill_(-1)
                grandchild = os.fork()
                if grandchild == 0:
                    os._exit(0 if (x == -1).all() else 1)
                status = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
                os._exit(0 if status == 0 and same and (x == -1).all() and out_of_dumps() else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert (x == 3).all(), x
            hvd.shutdown()
    """)
    with Job(2, code, tmp_path, fresh=True) as job:
        job.succeed()


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_children_that_were_forked_do_not_keep_connections_up(tmp_path, transport):
    """They have the sockets too, as workers of a DataLoader have: a shutdown waited for the peer timeout."""
    code = script("""
        import time
        hvd.init()
        hvd.allreduce(torch.ones(3))
        child = os.fork()
        if child == 0:
            time.sleep(120)
            os._exit(0)
        try:
            start = time.monotonic()
            hvd.shutdown()
            assert (took := time.monotonic() - start) < 20, took
            hvd.init()
            hvd.allreduce(torch.ones(3))
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
    """)
    with Job(2, code, tmp_path, fresh=True, PACELINE_PEER_TIMEOUT="60", PACELINE_TRANSPORT=transport) as job:
        job.succeed()


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_a_killed_rank_is_noticed_though_children_that_it_forked_live_on(tmp_path, transport):
    code = script("""
        import signal, time
        hvd.init()
        hvd.allreduce(torch.ones(3))
        if hvd.rank() == 1:
            child = os.fork()
            if child == 0:
                time.sleep(60)  # after that the connection ends anyway
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            hvd.allreduce(torch.ones(3))
            raise SystemExit("no error")
        except hvd.HorovodInternalError as e:
            assert "worker 1" in str(e), e
        assert (took := time.monotonic() - start) < 20, took
    """)
    with Job(2, code, tmp_path, fresh=True, PACELINE_PEER_TIMEOUT="60", PACELINE_TRANSPORT=transport) as job:
        ended = job.wait()
    assert [end.status for end in ended] == [0, -9], ended


def test_operations_from_several_threads(tmp_path):
    code = script("""
        import threading
        hvd.init()

        def work(number):
            for i in range(50):
                x = torch.full((1000,), float(i))
                assert torch.equal(hvd.allreduce(x, op=hvd.Sum, name=f"thread {number}"), x * hvd.size())

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        hvd.init()
        assert hvd.allgather_object(hvd.rank()) == [0, 1]
    """)
    with Job(2, code, tmp_path) as job:
        assert job.succeed() == ["", ""]


def test_process_sets_given_to_init(tmp_path):
    code = script("""
        evens, odds = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])
        for _ in range(3):
            hvd.init(process_sets=[evens, odds])
            mine = evens if hvd.rank() % 2 == 0 else odds
            assert mine.included() and mine.rank() == hvd.rank() // 2
            assert hvd.allgather(torch.tensor([hvd.rank()]), process_set=mine).tolist() == mine.ranks
            hvd.shutdown()
        hvd.init(process_sets=[hvd.ProcessSet([0, 1])])
        assert evens.process_set_id is None and odds.size() is None, "numbers of an earlier round"
        hvd.shutdown()
        try:
            hvd.init(process_sets=[evens, hvd.ProcessSet([2, 0])])
            raise SystemExit("the same set twice was accepted")
        except ValueError as e:
            assert "duplicate" in str(e), e
    """)
    with Job(3, code, tmp_path) as job:
        job.succeed()


def test_ranks_that_are_copies_of_one_process_are_told_apart(tmp_path):
    # What Go's math/rand begins with is the same in all of them.
    with Job(6, script("hvd.init(); assert hvd.allgather_object(hvd.rank()) == list(range(6))"), tmp_path) as job:
        assert job.succeed() == [""] * 6


def test_wrong_arguments_of_init(tmp_path):
    code = script("""
        def refused(text, **arguments):
            try:
                hvd.init(**arguments)
            except ValueError as e:
                assert text in str(e), e
                assert not hvd.is_initialized()
                return
            raise SystemExit(f"{arguments} was accepted")

        refused("no MPI communicators", comm=object())
        refused("use a process set", comm=[0])
        refused('give a list of process sets, or "dynamic"', process_sets="static")
        hvd.init(comm=[0, 1], process_sets="Dynamic")
        assert hvd.add_process_set([0]).size() == 1

        for text, again in ("use a process set", {"comm": [0]}), ("too late", {"process_sets": [hvd.ProcessSet([1])]}):
            try:
                hvd.init(**again)
                raise SystemExit(f"{again} was accepted by a running job")
            except ValueError as e:
                assert text in str(e), e
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0], "the job does not continue"
        known = hvd.ProcessSet([0])
        hvd.init(process_sets=[known])
        assert known.size() == 1
    """)
    with Job(2, code, tmp_path) as job:
        job.succeed()


def test_a_wrong_setting_is_shown_at_the_users_call_alone(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import paceline.torch as hvd\nhvd.init()\n")
    env = os.environ | {"PACELINE_SYNC": "sps:3"}
    run = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=HANG_S)
    assert run.returncode == 1
    assert 'ValueError: PACELINE_SYNC: unknown synchronisation model "sps:3", did you mean "ssp"?' in run.stderr
    assert run.stderr.count("File ") == 2 and "engine.py" not in run.stderr, run.stderr  # its call, and init()


def test_what_nobody_synchronized_is_released_at_shutdown(tmp_path):
    code = script("""
        import gc, weakref
        from paceline.common import handles
        for i in range(5):
            hvd.init()
            done, alone = torch.ones(1000), torch.ones(1000)
            seen = [weakref.ref(done), weakref.ref(alone)]
            ended = hvd.allreduce_async_(done)
            waits = hvd.allreduce_async_(alone, name=f"only rank {hvd.rank()}")
            rows = hvd.allgather_async(torch.ones(3, 2))
            hvd.barrier()
            del done, alone
            gc.collect()
            assert seen[1]() is not None, "the engine uses it"
            hvd.shutdown()
            gc.collect()
            assert [one() for one in seen] == [None, None] and not handles._pending, seen
            for handle in (ended, waits, rows):
                assert hvd.poll(handle)
                try:
                    hvd.synchronize(handle)
                    raise SystemExit("an operation of an earlier round ended well")
                except hvd.HorovodInternalError as e:
                    assert "shutdown()" in str(e), e
                assert hvd.synchronize(handle) is None
        print("well")
    """)
    with Job(2, code, tmp_path) as job:
        for one in job.wait():
            assert (one.status, one.output.strip()) == (0, "well"), one


def test_an_optimizer_goes_on_in_the_next_job(tmp_path):
    """What its hooks have collected, and what is in flight, ends with the first one."""
    code = script("""
        hvd.init()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
        def backward():
            optimizer.zero_grad()
            model(torch.full((1, 4), float(hvd.rank()))).sum().backward()
        def train():
            for _ in range(3):
                backward()
                optimizer.step()
                assert model[0].bias.grad.equal(model[0].weight.grad.sum(1) * 2 / 4), model[0].weight.grad
                assert model[1].bias.grad.tolist() == [1.0] * 4
        for fails in (False, True, False):
            train()
            stop = model[0].weight.register_hook(lambda _: 1 / 0) if fails else None
            try:
                backward()
            except ZeroDivisionError:
                stop.remove()
            hvd.shutdown()
            hvd.init()
            try:
                optimizer.step()
                raise SystemExit("a step of an earlier round ended well")
            except hvd.HorovodInternalError as e:
                assert "shutdown()" in str(e), e
        train()
        hvd.shutdown()
        print("well")
    """)
    with Job(2, code, tmp_path) as job:
        for one in job.wait():
            assert (one.status, one.output.strip()) == (0, "well"), one


def test_a_job_ends_though_what_it_waits_for_fails():
    """An error of the program in what is in flight is raised, behind the end of the job."""
    code = script("""
        from paceline.common.engine import engine

        def fails():
            raise RuntimeError("changed too early")

        hvd.init()
        engine.before_rest(fails)
        try:
            hvd.shutdown()
        except RuntimeError as e:
            assert str(e) == "changed too early" and not hvd.is_initialized()
        else:
            raise SystemExit("no error")
    """)
    ends_well_alone(code)


def test_seventy_thousand_operations_without_a_name(tmp_path):
    code = script("""
        hvd.init()
        x = torch.arange(4.0)
        handles = [hvd.allreduce_async(x, op=hvd.Sum) for _ in range(70_000)]
        for handle in handles:
            assert torch.equal(hvd.synchronize(handle), x * hvd.size())
        hvd.shutdown()
        print("well")
    """)
    with Job(2, code, tmp_path) as job:
        for one in job.wait():
            assert (one.status, one.output.strip()) == (0, "well"), one
