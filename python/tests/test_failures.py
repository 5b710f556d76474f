"""Failures of a rank, of the scheduler or of the secret: what the other ranks report, and how soon."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import time

import pytest
from jobs import HANG_S, Job, script, stop, wait_until_listens, wait_until_printed


@contextlib.contextmanager
def scheduler_at(port, env):
    """A scheduler in a process of its own, which listens by now."""
    command = ["paceline", "scheduler", "--listen", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, env=os.environ | env) as process:
        try:
            wait_until_listens(port, process)
            yield process
        finally:
            process.kill()


def test_an_exception_on_one_rank_ends_the_others_with_its_name(tmp_path):
    code = script("""
        hvd.init()
        hvd.barrier()
        if hvd.rank() == 1:
            raise KeyError("mine")
        hvd.allreduce(torch.ones(3), name="never")
    """)
    with Job(3, code, tmp_path, fresh=True) as job:
        ended = job.wait()
    assert [e.status for e in ended] == [1, 1, 1]
    assert "KeyError: 'mine'" in ended[1].output
    for other in (ended[0], ended[2]):
        assert "HorovodInternalError" in other.output and "rank 1" in other.output and "never" in other.output


def test_a_killed_rank_is_named_by_every_survivor_at_once(tmp_path):
    code = script("""
        hvd.init()
        hvd.allreduce(torch.ones(3))
        print("ready", flush=True)
        if hvd.rank() == 1:
            time.sleep(1000)  # until it is killed
        try:
            hvd.allreduce(torch.ones(1 << 20), name="waits")
        except hvd.HorovodInternalError as e:
            print("survivor:", e)
    """)
    with Job(3, code, tmp_path) as job:
        wait_until_printed(job, "ready")
        job.kill(1)
        ended = job.wait()
    for survivor in (ended[0], ended[2]):
        assert survivor.status == 0 and "survivor:" in survivor.output and "worker 1" in survivor.output
        # At once: the end of a connection said so, and no silence.
        assert re.search("without a goodbye|without finishing|reset by peer|broken pipe", survivor.output), survivor


@pytest.mark.parametrize(
    "in_the_middle_of", ["taking states", "loading states", "wait-free steps", "sums in the arena"]
)
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

        lent = hvd.zeros_in_arena(4_000_000)

        def in_arena():
            hvd.allreduce_(lent.fill_(1), op=hvd.Sum, name="lent")
            assert torch.equal(lent, torch.full_like(lent, 3))

        again = {{"taking states": paceline.compression_state, "loading states": load, "wait-free steps": step}}
        again["sums in the arena"] = in_arena
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
        wait_until_printed(job, "ready")
        time.sleep(0.5)  # so that they are at it
        job.kill(1)
        ended = job.wait()
    for survivor in (ended[0], ended[2]):
        assert survivor.status == 0 and "survivor:" in survivor.output and "worker 1" in survivor.output


def test_a_wrong_secret_keeps_a_process_out(tmp_path, port):
    code = script("""
        if os.environ["RANK"] == "1":
            os.environ["PACELINE_JOB_SECRET"] = "another secret, not that of the job"
        try:
            hvd.init()
            print("in")
        except hvd.HorovodInternalError as e:
            print("out:", e)
    """)
    env = {"PACELINE_JOB_SECRET": secrets.token_hex(16), "PACELINE_SCHEDULER": f"127.0.0.1:{port}"}
    with scheduler_at(port, env), Job(2, code, tmp_path, PACELINE_START_TIMEOUT="5", **env) as job:
        ended = job.wait()
    assert all(e.output.splitlines()[-1].startswith("out:") for e in ended), ended
    assert "secret" in ended[1].output


# Has two ranks reach init() together: its timeout is that of a later declaration too, and begins in neither before both
# have imported everything.
_TOGETHER = """open("{0}/imported" + os.environ["RANK"], "w").close()
        while not all(os.path.exists("{0}/imported" + rank) for rank in "01"):
            time.sleep(0.01)"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["gone", "stopped"])
def test_a_new_name_without_a_scheduler_ends_with_an_error_and_no_busy_wait(how, tmp_path, port):
    gone = tmp_path / "gone"
    code = script(f"""
        from paceline.common import abi
        {_TOGETHER.format(tmp_path)}
        hvd.init()
        hvd.allreduce(torch.ones(3), name="known")
        print("ready", flush=True)
        while not os.path.exists("{gone}"):
            time.sleep(0.01)
        waits, library = [], abi.library()
        wait_all = library.wait_all

        def wait(handles, count, timeout_ms):
            begun = time.monotonic()
            status = wait_all(handles, count, timeout_ms)
            waits.append((status, 1000 * (time.monotonic() - begun), timeout_ms.value))
            return status

        library.wait_all = wait
        try:
            hvd.allreduce(torch.ones(3), name="new")
            raise SystemExit("a tensor was declared without a scheduler")
        except hvd.HorovodInternalError as e:
            assert "new" in str(e) and "scheduler" in str(e), e
        early = [w for w in waits if w[0] == abi.ERR_TIMEOUT and w[1] < w[2] - 5]
        assert waits and not early, "waits that were to be repeated at once: " + str(early[:10])
        assert torch.equal(hvd.allreduce(torch.ones(3), name="known"), torch.ones(3))
    """)
    address = f"127.0.0.1:{port}"
    secret = secrets.token_hex(16)
    env = {"PACELINE_JOB_SECRET": secret, "PACELINE_SCHEDULER": address, "PACELINE_START_TIMEOUT": "12"}
    with scheduler_at(port, env) as scheduler, Job(2, code, tmp_path, **env) as job:
        wait_until_printed(job, "ready")
        if how == signal.SIGSTOP:
            stop(scheduler.pid)
        else:
            scheduler.send_signal(how)
        gone.touch()
        job.succeed()


def test_a_name_that_one_rank_cannot_declare_is_an_error_on_all_and_works_again(tmp_path, port):
    gone, back = tmp_path / "gone", tmp_path / "back"
    code = script(f"""
        {_TOGETHER.format(tmp_path)}
        hvd.init()
        if hvd.rank() == 0:
            early = hvd.allreduce_async(torch.ones(3), name="x")
        hvd.allreduce(torch.ones(3), name="y")  # rank 0 has declared x before
        print("ready", flush=True)
        while not os.path.exists("{gone}"):
            time.sleep(0.01)
        try:
            hvd.synchronize(early) if hvd.rank() == 0 else hvd.allreduce(torch.ones(3), name="x")
            raise SystemExit("a rank did without the other")
        except hvd.HorovodInternalError as e:
            assert '"x" could not be declared on rank 1' in str(e), e
        print("failed", flush=True)
        while not os.path.exists("{back}"):
            time.sleep(0.01)
        assert torch.equal(hvd.allreduce(torch.ones(3), name="x"), torch.ones(3))
    """)
    address = f"127.0.0.1:{port}"
    env = {"PACELINE_JOB_SECRET": secrets.token_hex(16), "PACELINE_SCHEDULER": address, "PACELINE_START_TIMEOUT": "12"}
    with scheduler_at(port, env) as scheduler, Job(2, code, tmp_path, **env) as job:
        wait_until_printed(job, "ready")
        scheduler.kill()
        scheduler.wait()
        gone.touch()
        wait_until_printed(job, "failed")
        with scheduler_at(port, env):
            back.touch()
            job.succeed()


@pytest.mark.parametrize("rank", [0, 1], ids=["rank 0 with the scheduler", "rank 1"])
@pytest.mark.parametrize(
    "doing", ["nothing", "allreduce", "broadcast", "allgather", "new names", "process sets", "ssp"]
)
def test_a_stopped_rank_is_named_by_every_survivor_and_then_by_itself(rank, doing, tmp_path):
    code = script(f"""
        hvd.init()
        last = time.monotonic()
        if {doing!r} == "ssp":
            net = torch.nn.Linear(300, 300)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters(), sync="ssp:1"
            )

        def ssp(i):
            net(torch.ones(4, 300)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        again = {{
            "nothing": lambda i: time.sleep(0.1),  # in the middle of nothing, as often as of the others
            "allreduce": lambda i: hvd.allreduce(torch.ones(5_000_000), name="data"),
            "broadcast": lambda i: hvd.broadcast(torch.ones(100_000), root_rank={rank}, name="data"),
            "allgather": lambda i: hvd.allgather(torch.ones(3, 1000), name="data"),
            "new names": lambda i: hvd.allreduce(torch.ones(3), name=f"data {{i}}"),
            "process sets": lambda i: hvd.remove_process_set(hvd.add_process_set([0, 1])),
            "ssp": lambda i: ssp(i),
        }}[{doing!r}]
        try:
            again(-1)
            hvd.allreduce(torch.ones(3), name="together")
            print("ready", flush=True)
            for i in range(1_000_000):
                again(i)
                if {doing!r} == "nothing" and time.monotonic() - last > 15:
                    hvd.allreduce(torch.ones(3), name="later")
        except hvd.HorovodInternalError as e:
            print("lost:", e, flush=True)
    """)
    with Job(3, code, tmp_path, PACELINE_PEER_TIMEOUT="3s") as job:
        wait_until_printed(job, "ready")
        stopped = job.processes[rank]
        stopped.send_signal(signal.SIGSTOP)
        survivors = [p for p in job.processes if p is not stopped]
        for p in survivors:
            p.wait(HANG_S)  # it does not wait for the one that is stopped
        stopped.send_signal(signal.SIGCONT)
        ended = job.wait()
    for e in ended:
        assert e.status == 0 and "lost:" in e.output and f"worker {rank}" in e.output and " on rank " in e.output, ended


@pytest.mark.parametrize("rank", [0, 1], ids=["rank 0 with the scheduler", "rank 1"])
def test_a_rank_that_is_stopped_within_the_peer_timeout_loses_nothing(rank, tmp_path):
    done = tmp_path / "done"
    code = script(f"""
        hvd.init()
        hvd.allreduce(torch.ones(3))
        print("ready", flush=True)
        i, goes_on = 0, torch.ones(1)
        while hvd.allreduce(goes_on, name="goes on", op=hvd.Min):
            i += 1
            assert torch.equal(hvd.allreduce(torch.ones(100_000), name=f"data {{i // 50}}"), torch.ones(100_000))
            goes_on = torch.tensor([0.0 if os.path.exists({str(done)!r}) else 1.0])
        hvd.shutdown()
    """)
    with Job(3, code, tmp_path, PACELINE_PEER_TIMEOUT="24s") as job:
        wait_until_printed(job, "ready")
        for _ in range(2):
            job.processes[rank].send_signal(signal.SIGSTOP)
            time.sleep(6)  # a quarter of the peer timeout: long enough for beats to be missed; this may take longer
            job.processes[rank].send_signal(signal.SIGCONT)
            time.sleep(0.2)  # so that it runs in between
        done.touch()
        job.succeed()


def test_a_rank_that_never_comes_is_warned_about_and_then_an_error(tmp_path):
    code = script(f"""
        given = [f"{tmp_path}/error{{r}}" for r in (0, 2)]
        hvd.init()
        if hvd.rank() != 1:
            try:
                hvd.allreduce(torch.ones(3), name="lonely")
                raise SystemExit("an operation ended well without one of its ranks")
            except hvd.HorovodInternalError as e:
                print("error:", e)
                open(f"{tmp_path}/error{{hvd.rank()}}", "w").close()
        else:
            while not all(map(os.path.exists, given)):
                time.sleep(0.05)
        assert torch.equal(hvd.allreduce(torch.ones(3), name="together"), torch.ones(3))
    """)
    times = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "8"}
    with Job(3, code, tmp_path, **times) as job:
        outputs = job.succeed()
    assert any(
        "warn" in line and "lonely" in line and "ranks [1]" in line for o in outputs for line in o.splitlines()
    ), outputs
    for survivor in (outputs[0], outputs[2]):
        error = next(line for line in survivor.splitlines() if line.startswith("error:"))
        assert "lonely" in error and "rank 1 did not come" in error
