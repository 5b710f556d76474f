"""Libraries that train by torch.distributed: each a real run on two ranks, whose numbers are Gloo's bit by bit.

The scripts ask for "gloo": some of the libraries take no name that they do not know.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HANG_S, clean_environment

SCRIPTS = Path(__file__).parent / "library_ranks"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SETTINGS = {
    "PACELINE_SUM_IN_RANK_ORDER": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": str(HANG_S),  # beside other load it takes longer than the 30 s that Ray waits
}
CLASSES = {"": "ProcessGroupGloo", "gloo": "PacelineBackend"}  # by what is taken over


@pytest.mark.parametrize("library", ["lightning", "accelerate", "transformers", "ray"])
def test_training_gives_the_bits_of_gloo(library, tmp_path):
    pytest.importorskip(library, reason=f"{library} is not installed here: make test-torch-libraries")
    results = [trained(library, takeover, tmp_path / backend) for takeover, backend in CLASSES.items()]
    assert results[0] == results[1]


def trained(library, takeover, folder):
    """What both ranks say, without the class of the backend, which is checked."""
    folder.mkdir()
    launcher = [sys.executable] if library == "ray" else TORCHRUN  # Ray starts the ranks itself
    env = clean_environment() | SETTINGS | {"PACELINE_TAKEOVER": takeover}
    done = subprocess.run(
        [*launcher, SCRIPTS / f"train_{library}.py", folder],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    # anywhere in a line: a library may write the end of its own line later, behind the other rank's
    said = sorted(re.findall(f"({'|'.join(CLASSES.values())}) (rank .*)", done.stdout))
    assert done.returncode == 0 and [one[0] for one in said] == [CLASSES[takeover]] * 2, done.stdout + done.stderr
    return [one[1] for one in said]
