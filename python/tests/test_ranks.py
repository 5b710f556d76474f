"""Runs each file of ranks/ under 2 and under 4 ranks: each rank runs pytest on the same checks in the same order.

Each file has a job of its own, so that a check that fails does not hide those of other files.
"""

import ctypes
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from jobs import Job, script

RANKS = Path(__file__).parent / "ranks"
CHECKS = sorted(RANKS.glob("check_*.py"))


@pytest.mark.parametrize("size", [2, 4], ids=["2 ranks", "4 ranks"])
@pytest.mark.parametrize("file", CHECKS, ids=[c.stem for c in CHECKS])
def test_every_rank_passes(file, size, tmp_path, request):
    device = request.getfixturevalue("device")[1] | {"OFFHOST_DEVICES": "2"} if file.stem == "check_device" else {}
    passes(file, size, tmp_path, **device)


def passes(file, size, tmp_path, **env):
    # -x: after a failed check the ranks no longer run the same operations.
    argv = [RANKS / "run.py", tmp_path, "-x", "-q", "-p", "no:cacheprovider", file]
    with Job(size, argv, tmp_path, **env) as job:
        ended = job.wait()
    problems = []
    for rank, end in enumerate(ended):
        report = tmp_path / f"rank{rank}.xml"
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
        failed = [
            (case.get("name"), p.text) for case in cases for kind in ("failure", "error") for p in case.iter(kind)
        ]
        problems += [f"rank {rank}, {name}:\n{text}" for name, text in failed]
        if not failed and (end.status or not cases):
            problems.append(f"rank {rank} ended with {end.status} after {len(cases)} checks:\n{end.output[-4000:]}")
    assert not problems, "\n\n".join(problems)


def test_statistics_of_batches_travel_as_they_are(tmp_path):
    """They are no gradients, and the number of values travels among them."""
    rules = tmp_path / "rules.json"
    rules.write_text('[{"names": ["*sync_batch_norm.*"], "min_bytes": 1, "codec": "int4"}]')
    passes(RANKS / "check_batch_norm.py", 2, tmp_path, PACELINE_COMPRESSION=str(rules))


def test_the_arena_stays_registered_with_a_fabric(tmp_path):
    """What is there before init and what comes after it, in two rounds; sums from there are right."""
    try:
        ctypes.CDLL("libfabric.so.1")
    except OSError as e:
        pytest.skip(f"libfabric is not on this machine: {e}")
    code = """
    hvd.init()
    size = hvd.size()
    before = hvd.zeros_in_arena(1 << 20)
    for _ in range(2):
        later = hvd.zeros_in_arena(1 << 18)
        for name, tensor in (("before", before), ("later", later)):
            tensor.fill_(hvd.rank() + 1)
            hvd.allreduce_(tensor, op=hvd.Sum, name=name)
            assert torch.equal(tensor, torch.full_like(tensor, size * (size + 1) // 2)), tensor
        del later, tensor
        hvd.shutdown()
        hvd.init()
    """
    env = {"PACELINE_TRANSPORT": "fabric", "PACELINE_FABRIC": "tcp;ofi_rxm", "PACELINE_LOG_LEVEL": "debug"}
    with Job(2, script(code), tmp_path, **env) as job:
        for output in job.succeed():
            registered = [line.split()[-1] for line in output.splitlines() if "memory is registered" in line]
            assert registered == ["4194304}", "1048576}", "4194304}", "1048576}", "4194304}"], output
