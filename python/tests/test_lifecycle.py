"""A job's life in its processes: starting and ending, again and again, by Ctrl-C, by a kill, and after fork."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from jobs import Job


def script(code):
    return [
        "-X",
        "faulthandler",
        "-c",
        "import os, sys, time, torch\nimport paceline.torch as hvd\n" + textwrap.dedent(code),
    ]


def printed(job, text, timeout_s=60):
    """Waits until every rank has printed the text."""
    deadline = time.monotonic() + timeout_s
    while not all(text in path.read_text() for path in job.outputs):
        assert time.monotonic() < deadline, [path.read_text() for path in job.outputs]
        assert all(p.poll() is None for p in job.processes), [path.read_text() for path in job.outputs]
        time.sleep(0.02)


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
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, *code], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


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
    with Job(2, code, tmp_path) as job:
        assert job.succeed() == ["", ""]


def test_nothing_is_printed_and_exit_without_shutdown_is_clean(tmp_path):
    with Job(3, script("hvd.init(); hvd.allreduce(torch.ones(100000)); hvd.allgather(torch.ones(2))"), tmp_path) as job:
        assert job.succeed() == ["", "", ""]


def test_an_exception_on_one_rank_ends_the_others_with_its_name(tmp_path):
    code = script("""
        hvd.init()
        hvd.barrier()
        if hvd.rank() == 1:
            raise KeyError("mine")
        hvd.allreduce(torch.ones(3), name="never")
    """)
    with Job(3, code, tmp_path) as job:
        ended = job.wait(60)
    assert [e.status for e in ended] == [1, 1, 1]
    assert "KeyError: 'mine'" in ended[1].output
    for other in (ended[0], ended[2]):
        assert "HorovodInternalError" in other.output and "rank 1" in other.output and "never" in other.output


def test_a_killed_rank_is_named_by_every_survivor_within_seconds(tmp_path):
    code = script("""
        hvd.init()
        hvd.allreduce(torch.ones(3))
        print("ready", flush=True)
        if hvd.rank() == 1:
            time.sleep(1000)
        try:
            hvd.allreduce(torch.ones(1 << 20), name="waits")
        except hvd.HorovodInternalError as e:
            print("survivor:", e)
    """)
    with Job(3, code, tmp_path) as job:
        printed(job, "ready")
        job.processes[1].kill()
        killed = time.monotonic()
        ended = job.wait(60)
        assert time.monotonic() - killed < 20
    for survivor in (ended[0], ended[2]):
        assert survivor.status == 0 and "survivor:" in survivor.output and "worker 1" in survivor.output


@pytest.mark.parametrize("in_the_middle_of", ["taking states", "loading states", "wait-free steps"])
def test_a_rank_that_is_killed_amid_what_others_do_is_named_by_them(in_the_middle_of, tmp_path):
    code = script(f"""
        import paceline
        hvd.init()
        layers = torch.nn.Sequential(*[torch.nn.Linear(200, 200) for _ in range(8)])
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(layers.parameters(), lr=1e-3), layers.named_parameters(), sync="ssp:2", wait_free=True
        )

        def step():
            layers(torch.ones(4, 200)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        def sums():
            for i in range(4):
                hvd.allreduce(torch.ones(400_000), name=f"sum {{i}}", compression="topk:0.01")

        def load():
            state = paceline.compression_state()
            hvd.barrier()
            paceline.load_compression_state(state)
            sums()
            hvd.barrier()

        again = {{"taking states": paceline.compression_state, "loading states": load, "wait-free steps": step}}
        sums()
        hvd.barrier()
        print("ready", flush=True)
        try:
            while True:
                again[{in_the_middle_of!r}]()
        except hvd.HorovodInternalError as e:
            print("survivor:", e)
        hvd.shutdown()
    """)
    with Job(3, code, tmp_path) as job:
        printed(job, "ready")
        time.sleep(0.5)  # so that they are at it
        job.processes[1].kill()
        ended = job.wait(60)
    for survivor in (ended[0], ended[2]):
        assert survivor.status == 0 and "survivor:" in survivor.output and "worker 1" in survivor.output


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
            time.sleep(1000)
        print("ready", flush=True)
        hvd.init()
        print("initialized", flush=True)
        if hvd.rank() == 1:
            time.sleep(1000)
        {wait[waits_in]}
    """)
    with Job(2, code, tmp_path) as job:
        printed(job, "ready" if waits_in == "init" else "initialized")
        time.sleep(0.3)  # into the wait
        for process in job.processes:
            process.send_signal(signal.SIGINT)
        pressed = time.monotonic()
        ended = job.wait(30)
        assert time.monotonic() - pressed < 25
    for end in ended:
        assert "KeyboardInterrupt" in end.output and "Fatal" not in end.output, end.output
        assert end.status in (1, 130, -signal.SIGINT)


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
    with Job(2, code, tmp_path) as job:
        job.succeed(120)


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
        assert job.succeed(120) == ["", ""]


def test_timelines_are_traces_that_name_the_tensors(tmp_path):
    code = script(f"""
        hvd.init()
        path = "{tmp_path}/trace.json"
        hvd.allreduce(torch.ones(5), name="before")
        hvd.start_timeline(path, mark_cycles=True)
        for i in range(10):
            hvd.allreduce(torch.ones(1 << 18), name="measured")
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(5), name="after")
        hvd.start_timeline("{tmp_path}/second.json")
        hvd.allgather(torch.ones(3), name="gathered")
        hvd.stop_timeline()
    """)
    with Job(2, code, tmp_path) as job:
        job.succeed(60)
    for suffix in ("json", "1.json"):
        trace = json.loads((tmp_path / f"trace.{suffix}").read_text())
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
        text = json.dumps(events)
        assert sum(e["ph"] == "X" and "allreduce" in e["name"].lower() for e in events) >= 10
        assert "measured" in text and "before" not in text and "after" not in text
        assert all("ph" in e and "pid" in e for e in events)
        assert "gathered" in json.dumps(json.loads((tmp_path / f"second.{suffix}").read_text()))


def test_the_timeline_variable_traces_a_whole_run(tmp_path):
    code = script('hvd.init(); hvd.allreduce(torch.ones(3), name="traced")')
    with Job(2, code, tmp_path, HOROVOD_TIMELINE=str(tmp_path / "trace.json")) as job:
        job.succeed(60)
    assert "traced" in json.dumps(json.loads((tmp_path / "trace.json").read_text()))


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
        job.succeed(60)


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
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0], "the job does not go on"
        known = hvd.ProcessSet([0])
        hvd.init(process_sets=[known])
        assert known.size() == 1
    """)
    with Job(2, code, tmp_path) as job:
        job.succeed(60)


def test_a_wrong_secret_keeps_a_process_out(tmp_path):
    code = script("""
        if os.environ["RANK"] == "1":
            os.environ["PACELINE_JOB_SECRET"] = "another secret, not that of the job"
        try:
            hvd.init()
            print("in")
        except hvd.HorovodInternalError as e:
            print("out:", e)
    """)
    with Job(2, code, tmp_path, PACELINE_START_TIMEOUT="5") as job:
        ended = job.wait(60)
    assert all(e.output.splitlines()[-1].startswith("out:") for e in ended), ended
    assert "secret" in ended[1].output


def test_a_new_name_without_a_scheduler_ends_with_an_error_and_no_busy_wait(tmp_path):
    gone = tmp_path / "gone"
    code = script(f"""
        hvd.init()
        hvd.allreduce(torch.ones(3), name="known")
        print("ready", flush=True)
        while not os.path.exists("{gone}"):
            time.sleep(0.01)
        before = time.process_time()
        try:
            hvd.allreduce(torch.ones(3), name="new")
            raise SystemExit("a tensor was declared without a scheduler")
        except hvd.HorovodInternalError as e:
            assert "new" in str(e) and "scheduler" in str(e), e
        assert time.process_time() - before < 1.5, "it waited at full speed"
        assert torch.equal(hvd.allreduce(torch.ones(3), name="known"), torch.ones(3))
    """)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    secret = secrets.token_hex(16)
    command = ["paceline", "scheduler", "--listen", address]
    env = {"PACELINE_JOB_SECRET": secret, "PACELINE_SCHEDULER": address, "PACELINE_START_TIMEOUT": "12"}
    with subprocess.Popen(command, env=os.environ | env) as scheduler, Job(2, code, tmp_path, **env) as job:
        printed(job, "ready")
        scheduler.kill()
        scheduler.wait()
        gone.touch()
        job.succeed(60)


def test_a_rank_that_never_comes_is_warned_about_and_then_an_error(tmp_path):
    code = script("""
        hvd.init()
        if hvd.rank() != 1:
            try:
                hvd.allreduce(torch.ones(3), name="lonely")
                raise SystemExit("an operation ended well without one of its ranks")
            except hvd.HorovodInternalError as e:
                print("error:", e)
        else:
            time.sleep(4)
        assert torch.equal(hvd.allreduce(torch.ones(3), name="together"), torch.ones(3))
    """)
    times = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    with Job(3, code, tmp_path, **times) as job:
        outputs = job.succeed(60)
    assert any(
        "warn" in line and "lonely" in line and "ranks [1]" in line for o in outputs for line in o.splitlines()
    ), outputs
    for survivor in (outputs[0], outputs[2]):
        error = next(line for line in survivor.splitlines() if line.startswith("error:"))
        assert "lonely" in error and "rank 1 did not come" in error
