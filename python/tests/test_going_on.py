"""Elastic jobs: real ranks and servers are killed or replaced while they train, and the others go on alike."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from elastic_runs import Elastic
from jobs import HANG_S, Job, clean_environment, goes_on

KILLED_ONE_AFTER_THE_OTHER = """
    import os, signal
    import torch
    import paceline.torch as hvd

    hvd.init()
    rank, order = hvd.rank(), [1, 0, 3]
    for step in range(40):
        ones = hvd.allreduce(torch.ones(300_000), name="x", op=hvd.Sum)
        mean = hvd.allreduce(torch.full((10,), 2.0), name=f"y{step // 5}", op=hvd.Average)
        live = 4 - step // 10
        remade = step % 10 == 9 and ones[0] == live - 1  # without the one that alone had got it, and was lost
        assert (ones[0] == live or remade) and torch.equal(ones, ones[0].expand(300_000)), (step, ones)
        assert torch.equal(mean, torch.full((10,), 2.0)), (step, mean)
        if step % 10 == 5:
            objects = hvd.allgather_object({"rank": rank})
            assert objects == [{"rank": r} for r in range(4) if r not in order[: step // 10]], (step, objects)
        if step % 10 == 9 and rank == dict(enumerate(order)).get(step // 10):
            os.kill(os.getpid(), signal.SIGKILL)
    print("done", rank)
"""


def test_ranks_with_the_servers_in_them_are_killed_until_one_is_left(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(KILLED_ONE_AFTER_THE_OTHER))
    with Elastic(tmp_path, "-np", "4", "--elastic", script=[sys.executable, str(script)]) as job:
        job.process.wait(HANG_S)
        job.reader.join()
        output = "".join(job.lines)
        assert job.process.returncode == 0, output
        assert "done 2" in output, output
        assert "it lost rank 1 on localhost, rank 0 on localhost, rank 3 on localhost" in output, output


def test_the_scheduler_goes_on_in_others_when_rank_0_is_killed(tmp_path):
    """Where a launcher other than Paceline's own has started the ranks, rank 0 runs it. Rank 1 is gone by then."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(KILLED_ONE_AFTER_THE_OTHER))
    with Job(4, [script], tmp_path, PACELINE_ELASTIC="1") as job:
        ended = job.wait()
    assert [e.status for e in ended] == [-9, -9, 0, -9], ended
    assert "done 2" in ended[2].output and "the scheduler is gone: it goes on in this process" in ended[2].output


WITHOUT_RANK_1 = """
    import os, signal
    import torch
    import paceline.torch as hvd

    hvd.init()
    rank = hvd.rank()
    if rank == 1:
        hvd.allreduce(torch.ones(1), op=hvd.Sum)
        os.kill(os.getpid(), signal.SIGKILL)
    while hvd.allreduce(torch.ones(1), op=hvd.Sum) != 2:
        pass

    x = torch.full((rank + 1, 2), 1.0, requires_grad=True)
    y = hvd.allgather(x)
    (y * torch.arange(4.0)[:, None] * (rank + 1)).sum().backward()  # of both ranks' gradients the mean: times 2
    assert y.shape == (4, 2) and x.grad[:, 0].tolist() == ([0] if rank == 0 else [2, 4, 6]), (y, x.grad)

    for nothing in (False, True):  # a rank without values counts
        values = torch.empty(0, 2) if nothing and rank else torch.full((1, 2), rank + 2.0)
        sparse = torch.sparse_coo_tensor(torch.full((1, len(values)), rank), values, (3, 2), check_invariants=True)
        mean = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average)().to_dense()
        assert mean[:, 0].tolist() == [1, 0, 0 if nothing else 2], mean

    torch.manual_seed(0)
    both, mine = torch.randn(6, 3).requires_grad_(), slice(0, 4) if rank == 0 else slice(4, 6)
    part = both.detach()[mine].clone().requires_grad_()
    ours, plain = hvd.SyncBatchNorm(3), torch.nn.BatchNorm1d(3)
    result, wanted = ours(part), plain(both)
    (result**3).sum().backward()
    (wanted**3).sum().backward()
    pairs = (result, wanted[mine]), (part.grad, both.grad[mine]), (ours.running_var, plain.running_var)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in pairs), pairs
    print("done", rank)
"""


def test_gradients_and_sparse_means_are_the_survivors(tmp_path):
    goes_on(WITHOUT_RANK_1, tmp_path, killed=1)


IN_THE_MIDDLE = """
    import os, random, signal, threading, time
    import torch
    import paceline.torch as hvd

    hvd.init()
    rank, dies = hvd.rank(), {1: 10, 2: 25}

    def die():
        time.sleep(0.02 * random.random())  # about a step: it comes anywhere in one
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(60):
        if step == dies.get(rank):
            threading.Thread(target=die).start()
        there = [r for r, _ in hvd.allgather_object((rank, step))]
        given = hvd.allgather(torch.full((rank + 1, 50000), float(rank)), name="rows")[:, ::1000]
        wanted = [torch.full((r + 1, 50), float(r)) for r in there]
        left = [torch.full((r + 1, 50), float(r)) for r in there if r in given]
        assert rank in given and any(torch.equal(given, torch.cat(rows)) for rows in (wanted, left)), given
        values = torch.ones(rank + 1, 20000)
        sparse = torch.sparse_coo_tensor(torch.full((1, rank + 1), rank), values, (4, 20000), check_invariants=True)
        mean = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average)().to_dense()
        alive = [r for r in there if mean[r].any()]
        assert all(torch.equal(mean[r], torch.full((20000,), (r + 1) / len(alive))) for r in alive), (alive, mean)
        root = 3 * (step % 2)
        data = hvd.broadcast(torch.full((70000,), step + rank + 0.5), root, name="data")
        assert torch.equal(data, torch.full((70000,), step + root + 0.5)), data
        assert hvd.broadcast_object({"step": step, "root": rank}, 3) == {"step": step, "root": 3}
        # the same on all that are left
        seen = repr((there, given.tolist(), mean.tolist()))
        seen = dict(hvd.allgather_object((rank, hash(seen))))
        assert seen[0] == seen[3], step
    assert there == [0, 3], there
    print("done", rank)
"""


def test_allgathers_and_broadcasts_go_on_where_ranks_are_killed_in_the_middle(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(IN_THE_MIDDLE))
    with Job(4, [script], tmp_path, PACELINE_ELASTIC="1", PYTHONHASHSEED="0") as job:
        ended = job.wait()
    assert [e.status for e in ended] == [0, -9, -9, 0], ended
    assert all(f"done {rank}" in ended[rank].output for rank in (0, 3)), ended


WITHOUT_RANK_0 = """
    import os, signal
    import torch
    import paceline, paceline.torch as hvd

    hvd.init()
    rank = hvd.rank()

    def trained(optimizer, model):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 4), rank + 1.0)).sum().backward()
            optimizer.step()
        optimizer.agree()
        parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
        live = hvd.allgather_object(parameters.tolist())
        assert all(p == live[0] for p in live), live

    def optimizer_of(model):
        sgd = torch.optim.SGD(model.parameters(), 0.01)
        return hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), sync=paceline.SSP(2))

    torch.manual_seed(rank)
    first = torch.nn.Linear(4, 4)
    optimizer = optimizer_of(first)
    trained(optimizer, first)
    if rank == 0:
        hvd.allreduce(torch.ones(1), op=hvd.Sum)
        os.kill(os.getpid(), signal.SIGKILL)
    while hvd.allreduce(torch.ones(1), op=hvd.Sum) != 2:
        pass
    trained(optimizer, first)
    second = torch.nn.Linear(4, 4)
    trained(optimizer_of(second), second)
    hvd.join()
    trained(optimizer, first)  # declares them anew
    print("done", rank)
"""


def test_servers_hold_parameters_after_the_loss_of_rank_0(tmp_path):
    goes_on(WITHOUT_RANK_0, tmp_path, killed=0)


REPLACED = """
    import torch

    import paceline.torch as hvd

    hvd.init()
    for step in range(1_000_000):
        ones = hvd.allreduce(torch.ones(50_000), name="x", op=hvd.Sum)
        new = hvd.allreduce(torch.ones(3), name=f"{step // 100}", op=hvd.Sum)
        assert torch.equal(ones, torch.full((50_000,), 2.0)) and new.tolist() == [2.0] * 3, (step, ones, new)
        if step % 50 == 0:
            print("step", step, flush=True)
            if hvd.broadcast_object(input() if hvd.rank() == 0 else None, 0, name="stop") == "stop":
                break
    print("joined", hvd.join())
"""


@pytest.mark.parametrize("own", [False, True])
def test_each_server_is_replaced_while_training_runs(own, tmp_path, port):
    """The rolling upgrade of docs/elastic.md. The launcher's own servers leave as others do."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(REPLACED).replace("input()", f"open({str(tmp_path / 'what')!r}).read()"))
    (tmp_path / "what").write_text("go on")
    secret = {"PACELINE_JOB_SECRET": "of a test of upgrades", "PACELINE_ELASTIC": "1"}
    flags = ["-np", "2", "--elastic", "--listen", f"127.0.0.1:{port}"]
    flags += ["--servers", "localhost,localhost"] if own else ["--num-servers", "2"]

    def server():
        command = ["paceline", "server", "--scheduler", f"127.0.0.1:{port}"]
        return subprocess.Popen(command, env=clean_environment() | secret)

    servers = []
    try:
        with Elastic(tmp_path, *flags, script=[sys.executable, str(script)], **secret) as job:
            if not own:
                servers = [server(), server()]

            def steps():
                seen = len(job.lines)
                job.wait(lambda: sum("step" in line for line in job.lines[seen:]) > 4)

            steps()
            for old in listed(port, secret):
                new = server()
                servers.append(new)
                job.wait(lambda pid=new.pid: pid in listed(port, secret))
                steps()
                os.kill(old, signal.SIGTERM)
                for began in servers:
                    assert began.pid != old or began.wait(HANG_S) == 0
                job.wait(lambda pid=old: pid not in listed(port, secret))
                steps()
            (tmp_path / "what").write_text("stop")
            assert job.ended() == 0, job.text()
            assert job.text().count("joined") == 2, job.text()
            assert job.text().count("has left; the job goes on without it") == (2 if own else 0), job.text()
            assert "it lost" not in job.text(), job.text()
    finally:
        for s in servers:
            s.kill()
            s.wait()


STEPS = """
    import json, os, pathlib, sys, torch
    import paceline.torch as hvd

    hvd.init()
    print(json.dumps({"what": "begin", "rank": hvd.rank(), "pid": os.getpid()}), flush=True)
    x = torch.ones(100_000)
    for step in range(100_000):
        hvd.allreduce(x, name="x", op=hvd.Sum)
        if step % 50 == 0:
            print("step", step, flush=True)
        if hvd.allreduce(torch.tensor([float(pathlib.Path(sys.argv[1]).exists())]), op=hvd.Max, name="stop").item():
            break
    print("done", hvd.rank())
"""


@pytest.mark.parametrize("what", ["a rank", "a server", "a server beside --min-np", "a server from elsewhere"])
def test_a_process_that_stays_frozen_is_not_waited_for(what, tmp_path, port):
    """The others train to the end, which then is the job's. A server from elsewhere is not this launcher's to end."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(STEPS))
    env = {"PACELINE_JOB_SECRET": "of a frozen process", "PACELINE_ELASTIC": "1", "PACELINE_PEER_TIMEOUT": "4"}
    flags = ["-np", "2", "--elastic", "--listen", f"127.0.0.1:{port}"]
    flags += ["--servers", "localhost,localhost"] if what != "a rank" else []
    flags += ["--min-np", "1"] if "min-np" in what else []
    servers = []
    try:
        with Elastic(tmp_path, *flags, script=[sys.executable, str(script), str(tmp_path / "stop")], **env) as job:
            job.wait(lambda: "step 50" in job.text())
            if what == "a server from elsewhere":
                command = ["paceline", "server", "--scheduler", f"127.0.0.1:{port}"]
                servers.append(subprocess.Popen(command, env=clean_environment() | env))
                job.wait(lambda: len(listed(port, env)) == 3)
                frozen = servers[0].pid
            elif what.startswith("a server"):
                frozen = listed(port, env)[1]
            else:
                frozen = next(line["pid"] for line in job.said("begin") if line["rank"] == 1)
            os.kill(frozen, signal.SIGSTOP)
            job.wait(lambda: "the job goes on without" in job.text())
            assert job.finish() == 0, job.text()
            assert f"done {'0' if what == 'a rank' else '1'}" in job.text(), job.text()
            whom = {"a rank": "rank 1 on", "a server from elsewhere": "server at "}.get(what, "server on")
            ended = "the training has come to its end without" if "min-np" in what else "the job ended well; it lost"
            assert f"{ended} {whom}" in job.text(), job.text()
            if not servers:
                assert f"(pid {frozen}) was given up by the others, and had not ended when they had" in job.text()
    finally:
        for s in servers:
            s.kill()
            s.wait()


def test_a_frozen_rank_of_a_job_that_is_not_elastic_is_not_waited_for(tmp_path):
    """The others have caught the error and end well; the job has failed all the same."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, torch
        import paceline.torch as hvd

        hvd.init()
        hvd.allreduce(torch.ones(2))
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            hvd.allreduce(torch.ones(2))
        except RuntimeError as error:
            print("caught", error)
    """)
    )
    command = ["paceline", "run", "-np", "2", sys.executable, str(script)]
    env = clean_environment() | {"PACELINE_PEER_TIMEOUT": "4"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 128 + signal.SIGKILL, run
    assert "caught" in run.stdout and "rank 1 on" in run.stderr, run
    assert "was given up by the others, and had not ended when they had: it is stopped" in run.stderr, run


def listed(port, secret):
    """The processes of the servers that `paceline servers` lists as there."""
    command = ["paceline", "servers", "--json", "--scheduler", f"127.0.0.1:{port}"]
    shown = subprocess.run(command, env=clean_environment() | secret, capture_output=True, text=True, check=True)
    return [server["pid"] for server in json.loads(shown.stdout) if "state" not in server]
