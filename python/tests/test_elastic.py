"""hvd.elastic: real jobs whose ranks are killed, added and removed while they train."""

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import hosts
import pytest
import torch
from elastic_runs import Elastic, end_alike, replace
from jobs import HANG_S, clean_environment

CROSS_BARRIER = {"JOB_OPTIONS": '{"cross_barrier": true}'}
IN_COMMIT = CROSS_BARRIER | {"JOB_EVERY": "1", "JOB_DIGESTS": "no"}  # which is where the loss shows


@pytest.mark.parametrize("options", [{}, CROSS_BARRIER | {"JOB_METRIC": "1"}, IN_COMMIT], ids=str)
def test_the_others_go_on_with_what_was_committed_when_a_rank_is_killed(options, tmp_path):
    if options is IN_COMMIT:
        (tmp_path / "die").touch()
    with Elastic(tmp_path, "-np", "3", "--min-np", "2", **options) as job:
        (first,) = job.wait(lambda: job.rounds(3))
        if options is not IN_COMMIT:
            job.kill(next(m for m in first if m["rank"] == 0))
        members = job.wait(lambda: job.rounds(2))[0]
        assert sorted(m["rank"] for m in members) == [0, 1] and all(m["resets"] == 1 for m in members)
        assert job.finish() == 0, job.text()
    end_alike(job, 2)
    assert "has come to its end without process 0 on localhost" in job.text()
    assert "localhost gets no new process any more" in job.text()


def test_a_replacement_gets_the_state_and_is_not_rank_0(tmp_path):
    flags = ["-np", "2", "--min-np", "2", "--blacklist-cooldown-range", "0.2", "1", "--horovod"]
    with Elastic(tmp_path, *flags, JOB_MODULE="horovod.torch", JOB_SETTINGS='{"compression": "fp16"}') as job:
        (first,) = job.wait(lambda: job.rounds(2))
        job.kill(next(m for m in first if m["rank"] == 0))
        members = job.wait(lambda: [r for r in job.rounds(2) if any(m["process"] == 2 for m in r)])[0]
        assert {m["rank"]: m["process"] for m in members} == {0: 1, 1: 2}, members
        assert {m["process"]: m["local_rank"] for m in members} == {1: 1, 2: 0}, "it has the lost one's GPU"
        assert job.finish() == 0, job.text()
    end_alike(job, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_went_on_without_a_rank_takes_its_replacement_in(rank, tmp_path):
    flags = ["-np", "3", "--min-np", "2", "--max-np", "3", "--elastic", "--blacklist-cooldown-range", "0.2", "1"]
    with Elastic(tmp_path, *flags) as job:
        (first,) = job.wait(lambda: job.rounds(3))
        job.kill(next(m for m in first if m["rank"] == rank))
        members = job.wait(lambda: [r for r in job.rounds(3) if any(m["process"] == 3 for m in r)])[0]
        # those that are left form a round before the replacement is there
        assert {m["process"]: m["resets"] for m in members} == {1 - rank: 2, 2: 2, 3: 0}, members
        assert {m["process"]: m["rank"] for m in members} == {1 - rank: 0, 2: 1, 3: 2}, members
        assert len(job.rounds(2)) == 1 and "going back" not in job.text(), job.text()
        assert job.finish() == 0, job.text()
    end_alike(job, 3)


@pytest.mark.parametrize("elastic", [True, False])
def test_a_server_of_the_launcher_is_killed(elastic, tmp_path):
    """With --elastic the others go on at another server; without, the job ends, and says why."""
    flags = ["-np", "2", "--min-np", "1", "--servers", "localhost,localhost" if elastic else "localhost"]
    with Elastic(tmp_path, *flags, *(["--elastic"] if elastic else [])) as job:
        job.wait(lambda: job.rounds(2))
        threads = Path(f"/proc/{job.process.pid}/task").glob("*/children")
        children = [child for thread in threads for child in thread.read_text().split()]
        server = next(p for p in children if b"server" in Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0"))
        os.kill(int(server), signal.SIGKILL)
        job.wait(lambda: f"(pid {server}) was killed" in job.text())
        if elastic:
            assert job.finish() == 0, job.text()
        else:
            assert job.ended() == 137, job.text()
    assert ("the training has come to its end without server on localhost" in job.text()) == elastic, job.text()


def test_nobody_waits_for_a_worker_that_stays_frozen(tmp_path):
    """Without --elastic its round ends, the others form the next, and it is stopped at the end."""
    (tmp_path / "ready").touch()
    with Elastic(tmp_path, "-np", "3", "--min-np", "1", JOB_PREPARES="yes", PACELINE_PEER_TIMEOUT="4") as job:
        (first,) = job.wait(lambda: job.rounds(3))
        job.wait(lambda: job.said("commit"))
        os.kill(next(m["pid"] for m in first if m["rank"] == 1), signal.SIGSTOP)
        (second,) = job.wait(lambda: job.rounds(2))
        assert {m["process"] for m in second} == {0, 2}, second
        assert job.finish() == 0, job.text()
    assert not job.rounds(1), job.text()
    assert "the training has come to its end without process 1 on localhost" in job.text(), job.text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_was_given_up_comes_back_as_one_that_joins(rank, tmp_path):
    (tmp_path / "ready").touch()
    flags = ["-np", "3", "--min-np", "2", "--elastic"]
    with Elastic(tmp_path, *flags, JOB_PREPARES="yes", PACELINE_PEER_TIMEOUT="4") as job:
        (first,) = job.wait(lambda: job.rounds(3))
        stopped = next(m for m in first if m["rank"] == rank)
        job.wait(lambda: job.said("commit"))
        os.kill(stopped["pid"], signal.SIGSTOP)
        job.wait(lambda: f"the job goes on without rank {rank}" in job.text())
        at = job.said("commit")[-1]["step"]
        job.wait(lambda: job.said("commit")[-1]["step"] > at + 20)
        os.kill(stopped["pid"], signal.SIGCONT)
        members = {m["process"]: m for m in job.wait(lambda: job.rounds(3)[1:])[0]}
        assert {n: m["rank"] for n, m in members.items()} == {1 - rank: 0, 2: 1, rank: 2}, members
        assert all(m["step"] > at + 20 for m in members.values()), "the state of those that went on is the newest"
        assert job.finish() == 0, job.text()
    end_alike(job, 3)
    assert "is stopped: its round ended" not in job.text()
    # the scheduler says it, or a server before it; without rank 0 the others have formed another round
    since = rf"(given up rank|worker) {rank} .* \(it is no member since epoch \d+, and the others go on without it\)"
    later = rf"rank {rank} .* comes back too late: the others have gone on without it"
    assert re.search(f"{since}|{later}", job.text()), job.text()


def test_hosts_that_are_found_later_join_and_those_that_go_end(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    flags = ("--min-np", "1", "--max-np", "3", "--host-discovery-script", f"cat {hosts}")
    with Elastic(tmp_path, *flags) as job:
        job.wait(lambda: job.rounds(2))
        replace(hosts, "127.0.0.1:2\nlocalhost:2\n")
        members = job.wait(lambda: job.rounds(3))[0]
        assert next(m for m in members if m["process"] == 2)["rank"] == 2, members
        replace(hosts, "localhost\n")
        (last,) = job.wait(lambda: job.rounds(1))[0]
        assert last["process"] == 0 and last["step"] > 0
        assert job.finish() == 0, job.text()
    end_alike(job, 1)
    assert "going back" not in job.text() and "without process" not in job.text(), job.text()
    assert "process 1 on localhost ends: localhost has no slot for it any more" in job.text()


def test_a_job_of_one_rank_that_runs_ahead_takes_others_in(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    flags = ("--min-np", "1", "--max-np", "2", "--host-discovery-script", f"cat {hosts}")
    with Elastic(tmp_path, *flags, JOB_OPTIONS='{"sync": "ssp:3"}') as job:
        job.wait(lambda: job.rounds(1))
        replace(hosts, "localhost:2\n")
        members = job.wait(lambda: job.rounds(2))[0]
        assert all(m["step"] > 0 for m in members), members
        assert job.finish() == 0, job.text()
    assert "going back" not in job.text(), job.text()


def test_the_others_train_while_a_new_process_prepares_itself(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    flags = ("--min-np", "2", "--max-np", "3", "--host-discovery-script", f"cat {hosts}")
    with Elastic(tmp_path, *flags, JOB_PREPARES="yes") as job:
        job.wait(lambda: job.rounds(2))
        replace(hosts, "localhost:3\n")
        (new,) = job.wait(lambda: job.said("prepare"))
        assert (new["rank"], new["size"]) == (2, 3), "it knows its place before it has joined"
        before = len(job.said("commit"))
        job.wait(lambda: len(job.said("commit")) > before + 10)
        assert not job.rounds(3)
        (tmp_path / "ready").touch()
        members = job.wait(lambda: job.rounds(3))[0]
        assert next(m for m in members if m["process"] == 2)["resets"] == 0, members
        assert job.finish() == 0, job.text()
    end_alike(job, 3)


def test_a_new_process_gets_another_place_than_it_expected(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    flags = ("--min-np", "2", "--max-np", "4", "--host-discovery-script", f"cat {hosts}")
    with Elastic(tmp_path, *flags, JOB_PREPARES="yes") as job:
        job.wait(lambda: job.rounds(2))
        replace(hosts, "localhost:4\n")
        job.wait(lambda: len(job.said("prepare")) == 2)
        expected = {m["process"]: m for m in job.said("prepare")}
        assert (expected[3]["rank"], expected[3]["size"]) == (3, 4), expected
        job.kill(expected[2])
        (tmp_path / "ready").touch()
        members = {m["process"]: m for m in job.wait(lambda: job.rounds(3))[0]}
        assert members[3]["rank"] == 2 and members[3]["resets"] == 1, members
        assert members[0]["resets"] == members[1]["resets"] == 1, members
        assert job.finish() == 0, job.text()
    end_alike(job, 3)


def test_an_operation_before_the_training_function_joins_the_others(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    flags = ("--min-np", "2", "--max-np", "3", "--host-discovery-script", f"cat {hosts}")
    with Elastic(tmp_path, *flags, JOB_BEFORE="yes") as job:
        job.wait(lambda: job.rounds(2))
        replace(hosts, "localhost:3\n")
        members = job.wait(lambda: job.rounds(3))[0]
        assert {m["process"]: m["resets"] for m in members} == {0: 1, 1: 1, 2: 0}, members
        assert job.finish() == 0, job.text()
    end_alike(job, 3)


def test_a_host_where_a_process_failed_gets_no_new_one(tmp_path):
    flags = ("--min-np", "1", "-H", "127.0.0.2:1,127.0.0.3:1", "--max-np", "2")
    with Elastic(tmp_path, *flags) as job:
        (first,) = job.wait(lambda: job.rounds(2))
        job.kill(next(m for m in first if m["process"] == 1))
        job.wait(lambda: job.rounds(1))
        assert job.finish() == 0, job.text()
    end_alike(job, 1)
    assert "127.0.0.3 gets no new process any more" in job.text()


@pytest.mark.skipif(hosts.available() is not None, reason=str(hosts.available()))
def test_other_hosts_join_fail_and_are_cut_off(tmp_path):
    """The launcher knows of one host alone at first, its own."""
    found = tmp_path / "hosts"
    found.write_text("one:1\n")
    flags = ["--min-np", "1", "--max-np", "4", "--host-discovery-script", f"cat {found}"]
    with hosts.Hosts(["one", "two", "three"], tmp_path) as network:
        env = {"PACELINE_REMOTE_SHELL": network.remote_shell(), "PACELINE_PEER_TIMEOUT": "5"}
        env["within"] = lambda command: network.command("one", "exec " + shlex.join(command))
        with Elastic(tmp_path, *flags, "--network-interfaces", "eth0", **env) as job:
            job.wait(lambda: job.rounds(1))
            replace(found, "one:1\ntwo:1\nthree:2\n")
            members = job.wait(lambda: job.rounds(4))[0]
            assert {m["host"] for m in members} == {"one", "two", "three"}, members
            job.kill(next(m for m in members if m["host"] == "two"))
            members = job.wait(lambda: job.rounds(3))[0]
            assert [m["host"] for m in sorted(members, key=lambda m: m["rank"])].count("three") == 2, members
            network.unplug("three")
            for m in members:
                if m["host"] == "three":
                    job.kill(m)  # the launcher would wait for the elastic timeout, but `one` has to notice the cut
            (last,) = job.wait(lambda: job.rounds(1)[1:])[0]
            assert last["host"] == "one"
            assert job.finish() == 0, job.text()
    end_alike(job, 1)
    assert "two gets no new process any more" in job.text()


def test_the_reset_limit_ends_the_job(tmp_path):
    flags = ["-np", "2", "--min-np", "1", "--reset-limit", "1", "--blacklist-cooldown-range", "0.1", "0.1"]
    with Elastic(tmp_path, *flags) as job:
        (first,) = job.wait(lambda: job.rounds(2))
        job.kill(next(m for m in first if m["rank"] == 1))
        assert job.ended() not in (0, None)
    assert "the ranks would form a new round after the limit of 1 (--reset-limit)" in job.text()


def test_too_few_processes_end_the_job_after_the_elastic_timeout(tmp_path):
    flags = ["--min-np", "3", "-H", "localhost:1", "--elastic-timeout", "0.5"]
    with Elastic(tmp_path, *flags, script=["sleep", "1000"]) as job:
        assert job.ended() == 1
    assert "after 500ms 0 of 3 processes (--min-np) are there; hosts: localhost with 1 slots" in job.text()


def test_a_script_that_never_commits_is_warned_of(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    flags = ("--min-np", "1", "--host-discovery-script", f"cat {hosts}")
    with Elastic(tmp_path, *flags, JOB_COMMITS="no", PACELINE_STALL_WARNING="0.1") as job:
        job.wait(lambda: job.rounds(1))
        replace(hosts, "localhost:2\n")
        job.wait(lambda: "waits until the ranks call state.commit()" in job.text())
        (tmp_path / "stop").touch()
        assert job.ended() == 0, job.text()


def test_a_loss_says_that_nothing_was_committed(tmp_path):
    with Elastic(tmp_path, "-np", "2", "--min-np", "1", JOB_COMMITS="no") as job:
        (first,) = job.wait(lambda: job.rounds(2))
        job.kill(first[1])
        job.wait(lambda: job.rounds(1))
        (tmp_path / "stop").touch()
        assert job.ended() == 0, job.text()
    said = "going back to what was committed last, which is nothing; call state.commit() every few batches"
    assert said in job.text()


def test_an_exception_of_one_rank_is_a_lost_rank(tmp_path):
    code = """
        import os, torch, paceline.torch as hvd
        hvd.init()
        @hvd.elastic.run
        def train(state):
            if os.environ["PACELINE_ELASTIC_PROCESS"] == "1":
                raise ValueError("boom")
            while not hvd.size() == 1:
                hvd.allreduce(torch.ones(3))
                state.commit()
        train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, x=1))
        print("trained")
    """
    script = [sys.executable, "-c", textwrap.dedent(code)]
    with Elastic(tmp_path, "-np", "2", "--min-np", "1", script=script) as job:
        assert job.ended() == 0, job.text()
    assert "ValueError: boom" in job.text() and "[0]<stdout>:trained" in job.text()


def test_ctrl_c_reaches_the_program_while_it_listens_for_hosts(tmp_path):
    """A thread of it waits for the launcher's news in Go, where a listener for signals took them from Python."""
    code = """
        import os, signal, time, torch, paceline.torch as hvd
        hvd.init()
        @hvd.elastic.run
        def train(state):
            hvd.allreduce(torch.ones(3))
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        try:
            train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, x=1))
            print("went on")
        except KeyboardInterrupt:
            print("saved")
    """
    script = [sys.executable, "-c", textwrap.dedent(code)]
    with Elastic(tmp_path, "-np", "2", "--min-np", "1", script=script) as job:
        assert job.ended() == 0, job.text()
    assert job.text().count("<stdout>:saved") == 2, job.text()


def test_twenty_rounds_leave_nothing_behind(tmp_path):
    code = """
        import gc, os, torch, paceline.torch as hvd
        from paceline.common.exceptions import HostsUpdatedInterrupt
        hvd.init()
        seen = []
        def use():
            kb = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmRSS"))
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), kb
        @hvd.elastic.run
        def train(state):
            hvd.allreduce(torch.ones(100_000))
            seen.append(use())
            if len(seen) < 26:
                raise HostsUpdatedInterrupt()
        train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, x=1))
        (fds, tasks, kb), last = seen[5], seen[-1]
        assert last[0] <= fds + 10 and last[1] <= tasks + 15 and last[2] <= kb + 30_000, seen
        print("the same")
    """
    script = [sys.executable, "-c", textwrap.dedent(code)]
    with Elastic(tmp_path, "-np", "2", "--min-np", "2", script=script) as job:
        assert job.ended() == 0, job.text()
    assert job.text().count("the same") == 2, job.text()


def test_the_example_survives_the_loss_of_a_rank(tmp_path):
    script = [sys.executable, str(Path(__file__).parents[2] / "examples/elastic_digits.py"), "--epochs", "8"]
    with Elastic(tmp_path, "-np", "3", "--min-np", "2", script=script) as job:
        job.wait(lambda: "epoch  1/8" in job.text())
        os.kill(int(re.search(r"rank 1 of 3 \(pid (\d+)\)", job.text())[1]), signal.SIGKILL)
        assert job.ended() == 0, job.text()
    text = job.text()
    assert "parameters:    identical" in text and len(re.findall(r"of 2 \(pid \d+\) trains from", text)) == 2, text
    assert float(re.search(r"test accuracy: ([\d.]+)%", text)[1]) > 85, text


def test_torchrun_starts_the_ranks_again_and_they_go_on(tmp_path):
    """One rank dies once; torchrun restarts all, and they load what rank 0 has saved."""
    path = tmp_path / "train.py"
    path.write_text("""
import os, signal, sys, torch, paceline.torch as hvd
saved = sys.argv[1]
hvd.init()
@hvd.elastic.run
def train(state):
    while state.step < 20:
        state.total += hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        state.step += 1
        state.commit()
        if state.step == 10 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if hvd.rank() == 0:
                torch.save((state.step, state.total), saved)
            hvd.barrier()
            if hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
step, total = torch.load(saved) if os.path.exists(saved) else (0, 0.0)
state = hvd.elastic.TorchState(step=step, total=total)
train(state)
assert (state.step, state.total) == (20, 40.0), (state.step, state.total)
print("rank", hvd.rank(), "trained", flush=True)
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(path), str(tmp_path / "saved")]
    env = clean_environment() | {"OMP_NUM_THREADS": "1", "PACELINE_START_TIMEOUT": "180"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("trained") == 2, done.stdout + done.stderr


class Agent:
    """torchrun on one of one to two hosts, whose first runs the rendezvous."""

    def __init__(self, number: int, port: int, *script: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
        command += ["--max-restarts", "20", "--rdzv-id", "elastic", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", f"localhost:{port}", "--monitor-interval", "0.1"]
        # An agent whose process has gone is not waited for longer than on a crowded machine one may be busy.
        conf = f"is_host={number == 0},last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=10"
        # With a shared store PyTorch publishes the address of rank 0 in the first round alone.
        own = {"OMP_NUM_THREADS": "1", "PACELINE_START_TIMEOUT": "180", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.lines = []
        self.process = subprocess.Popen(
            [*command, "--rdzv-conf", conf, *script],
            env=clean_environment() | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)

    def waits_for(self, pattern: str) -> re.Match:
        """The latest line that has the pattern, once there is one."""
        deadline = time.monotonic() + HANG_S
        while True:
            for line in reversed(list(self.lines)):
                if found := re.search(pattern, line):
                    return found
            assert self.process.poll() is None and time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.1)

    def ends(self) -> int:
        """Its exit code."""
        code = self.process.wait(HANG_S)
        self.reader.join()
        return code


def test_torchrun_changes_the_number_of_hosts(tmp_path, port):
    """--nnodes 1:2: a second host comes, is killed and comes again; the ranks start anew and load what was saved."""
    path, stop = tmp_path / "train.py", tmp_path / "stop"
    path.write_text("""
import os, sys, time, torch, paceline.torch as hvd
saved, stop = sys.argv[1:]
hvd.init()
step, sizes = torch.load(saved) if os.path.exists(saved) else (0, [])
state = hvd.elastic.TorchState(step=step, sizes=[*sizes, hvd.size()])
@hvd.elastic.run
def train(state):
    print("begins of", hvd.size(), "as", os.getpid(), flush=True)
    while not hvd.broadcast_object(os.path.exists(stop), name="stop"):
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
        state.step += 1
        state.commit()
        if hvd.rank() == 0:
            torch.save((state.step, state.sizes), saved + ".new")
            os.replace(saved + ".new", saved)
        time.sleep(0.02)
train(state)
print("trained", state.step, state.sizes, flush=True)
""")
    saved = tmp_path / "saved"
    script = [str(path), str(saved), str(stop)]
    agents = [Agent(0, port, *script)]

    def waits_for_step_of(size):
        """Until a step of so many ranks is saved, so that the next ranks load it."""
        deadline = time.monotonic() + HANG_S
        while not saved.exists() or torch.load(saved)[1][-1] != size:
            assert time.monotonic() < deadline, "".join(agents[0].lines)
            time.sleep(0.1)

    try:
        waits_for_step_of(1)
        agents.append(Agent(1, port, *script))
        rank = agents[1].waits_for(r"begins of 2 as (\d+)")
        waits_for_step_of(2)
        agents[1].process.kill()  # torchrun's processes are not in its group
        os.kill(int(rank[1]), signal.SIGKILL)
        waits_for_step_of(1)
        agents.append(Agent(2, port, *script))
        agents[2].waits_for("begins of 2 as")
        stop.touch()
        assert [agents[0].ends(), agents[2].ends()] == [0, 0], "".join(agents[0].lines + agents[2].lines)
        sizes = [int(n) for n in agents[0].waits_for(r"trained \d+ \[(.*)\]")[1].split(", ")]
        assert sizes[0] == 1 and sizes[-1] == 2 and 1 in sizes[sizes.index(2) :], sizes
    finally:
        for agent in agents:
            agent.process.terminate()  # it ends its rank
            agent.ends()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--max-np 3", "--max-np is for a job whose number of processes may change"),
        ("--min-np 3 --max-np 2", "--max-np 2 is less than --min-np 3"),
        ("-np 1 --min-np 3", "-np 1 does not lie between --min-np 3"),
        ("--min-np 1 --blacklist-cooldown-range 5 1", "the first number is the smaller one"),
        ("--min-np 1 --host-discovery-script false", "--host-discovery-script false: exit status 1"),
        ("--min-np 1 --scheduler localhost:1", "leave --scheduler out"),
        ("--host-discovery-script ls -H localhost:1", "leave --hosts and --hostfile out"),
    ],
)
def test_wrong_flags(flags, said):
    done = subprocess.run(
        ["paceline", "run", *flags.split(), "true"], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode not in (0, None) and said in done.stderr, done.stderr
