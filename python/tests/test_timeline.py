"""Timelines: Chrome traces of a rank's operations."""

import json
import subprocess

from jobs import Job, script, wait_until_printed


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
        for i in range(3):
            hvd.allreduce_(hvd.zeros_in_arena(1 << 18), name="in the arena")
        on_its_way = hvd.allreduce_async(torch.ones(5), name="on its way")
        hvd.start_timeline("{tmp_path}/third.json")
        hvd.synchronize(on_its_way)
        hvd.allreduce(torch.ones(1 << 18), name="long" * 100)
        hvd.start_timeline("{tmp_path}/third.json")  # the same file, which is shorter now
        hvd.allreduce(torch.ones(5), name="last")
        hvd.stop_timeline()
    """)
    with Job(2, code, tmp_path) as job:
        job.succeed()
    for suffix in ("json", "1.json"):
        trace = json.loads((tmp_path / f"trace.{suffix}").read_text())
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
        text = json.dumps(events)
        assert sum(e["ph"] == "X" and "allreduce" in e["name"].lower() for e in events) >= 10
        assert "measured" in text and "before" not in text and "after" not in text
        assert all("ph" in e and "pid" in e for e in events)
        second, third = (json.loads((tmp_path / f"{name}.{suffix}").read_text()) for name in ("second", "third"))
        assert "gathered" in json.dumps(second) and "last" in json.dumps(third) and "long" not in json.dumps(third)
        assert all(e.get("ts", 0) >= 0 for trace in (second, third) for e in trace)
        rows = {e["tid"] for e in second if e["ph"] == "M" and e["args"].get("name", "").endswith("in the arena")}
        waits = [e for e in second if e["tid"] in rows and e["name"].startswith("wait")]
        assert rows and waits, second


def test_the_timeline_variable_traces_a_whole_run(tmp_path):
    code = script('hvd.init(); hvd.allreduce(torch.ones(3), name="traced")')
    with Job(2, code, tmp_path, HOROVOD_TIMELINE=str(tmp_path / "trace.json")) as job:
        job.succeed()
    assert "traced" in json.dumps(json.loads((tmp_path / "trace.json").read_text()))


def rows_that_do_not_nest(events):
    """The slices that overlap another of their row without lying within it. Times to the nanosecond."""
    rows, wrong = {}, []
    for e in events:
        if e["ph"] == "X":
            begin = round(e["ts"] * 1e3)
            rows.setdefault((e["pid"], e["tid"]), []).append(
                (begin, -round((e["ts"] + e.get("dur", 0)) * 1e3), e["name"])
            )
    for row in rows.values():
        open_slices = []
        for begin, end, name in sorted(row):
            while open_slices and -open_slices[-1] <= begin:
                open_slices.pop()
            if open_slices and -end > -open_slices[-1]:
                wrong.append(name)
            open_slices.append(end)
    return wrong


def test_slices_nest_and_merged_timelines_say_for_whom_a_rank_waited(tmp_path):
    come = tmp_path / "come"
    code = script(f"""
        hvd.init()
        for i in range(3):
            large = [hvd.allreduce_async(torch.ones(3 << 20), name=f"large{{k}}") for k in range(3)]
            small = [hvd.allreduce_async(torch.ones(7), name=f"small{{k}}") for k in range(20)]
            for handle in large + small:
                hvd.synchronize(handle)
            while hvd.rank() == 1 and not os.path.exists({str(come)!r}):
                time.sleep(0.01)
            hvd.allreduce(torch.ones(1 << 10), name="late")
            hvd.broadcast(torch.ones(5), root_rank=0, name="sent")
            hvd.allgather(torch.ones(5), name="gathered")
            hvd.allreduce(torch.ones(1 << 18), name="coded", compression=hvd.Compression.onebit())
    """)
    settings = {"PACELINE_TIMELINE": str(tmp_path / "trace.json"), "PACELINE_PARTITION_BYTES": "65536"}
    with Job(2, code, tmp_path, PACELINE_STALL_WARNING="0.2", **settings) as job:
        wait_until_printed(job, "late", ranks=[0])  # a server has rank 0's part, and warns that rank 1 is missing
        come.touch()
        job.succeed()
    files = [tmp_path / "trace.json", tmp_path / "trace.1.json"]
    for file in files:
        assert rows_that_do_not_nest(json.loads(file.read_text())) == []
    merged = tmp_path / "merged.json"
    done = subprocess.run(["paceline", "timeline", "merge", "-o", merged, *files], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")  # no warning: the clocks are aligned
    events = json.loads(merged.read_text())
    assert rows_that_do_not_nest(events) == []
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {0, 1}
    assert {"encode", "queue", "send", "receive", "decode"} <= {e["name"] for e in slices}
    waits = {e["name"] for e in slices if e["pid"] == 0 and e["name"].startswith("wait")}
    assert "wait for rank 1" in waits

    # The clocks are aligned: no rank has the last sum before the other has begun with it.
    last = [
        max((e["ts"], e["dur"]) for e in slices if e["name"] == "allreduce" and e["pid"] == rank) for rank in (0, 1)
    ]
    assert min(e["ts"] for e in slices) == 0
    assert all(begin < end + dur + 1e6 for (begin, _), (end, dur) in (last, last[::-1])), last  # microseconds
