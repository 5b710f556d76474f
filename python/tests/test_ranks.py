"""Runs every file of ranks/ under 2 and under 4 ranks: each rank runs pytest on the same checks in the same order."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from jobs import Job

CHECKS = sorted((Path(__file__).parent / "ranks").glob("check_*.py"))


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def reports(request, tmp_path_factory):
    """File of checks -> (how many passed, what failed), over all ranks. One job runs them all."""
    size, directory = request.param, tmp_path_factory.mktemp("ranks")
    # -x: after a failed check the ranks no longer run the same operations.
    argv = [Path(__file__).parent / "ranks" / "run.py", directory, "-x", "-q", "-p", "no:cacheprovider", *CHECKS]
    with Job(size, argv, directory) as job:
        ended = job.wait()
    passed, failed = dict.fromkeys((c.stem for c in CHECKS), 0), {c.stem: [] for c in CHECKS}
    for rank, end in enumerate(ended):
        report = directory / f"rank{rank}.xml"
        if not report.exists():
            failed[CHECKS[-1].stem].append(f"rank {rank} ended with {end.status}:\n{end.output[-4000:]}")
            continue
        for case in ET.parse(report).iter("testcase"):
            file = case.get("classname").split(".")[-1]
            problems = [p.text for kind in ("failure", "error") for p in case.iter(kind)]
            passed[file] += not problems
            failed[file] += [f"rank {rank}, {case.get('name')}:\n{p}" for p in problems]
    return size, passed, failed


@pytest.mark.parametrize("check", [c.stem for c in CHECKS])
def test_every_rank_passes(reports, check):
    size, passed, failed = reports
    assert not failed[check], "\n\n".join(failed[check])
    assert passed[check] >= size, f"{check} did not run on every rank: a file before it failed"
