"""Timelines: Chrome traces of a rank's operations."""

import json

from jobs import Job, script


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
