"""What crosses a host's link where several of its workers sum with servers on other hosts."""

import json
import subprocess

import hosts
import pytest
from jobs import HANG_S, clean_environment

pytestmark = pytest.mark.skipif(hosts.available() is not None, reason=str(hosts.available()))

STEPS, ELEMENTS = 8, 1 << 20
TRAINING = f"""
import torch
import paceline.torch as hvd

hvd.init()
gradient = torch.ones({ELEMENTS})
for step in range({STEPS}):
    total = hvd.allreduce(gradient * (hvd.rank() + 1), name="gradient", op=hvd.Sum)
    assert torch.equal(total, gradient * sum(range(1, hvd.size() + 1))), total
assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (4, 2, 2)
hvd.shutdown()
"""


def crossed(network, host):
    """The bytes that a host has received and sent."""
    command = ["ip", "-n", network._namespace(host), "-s", "-j", "link", "show", "eth0"]
    counts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)[0]["stats64"]
    return counts["rx"]["bytes"], counts["tx"]["bytes"]


@pytest.mark.parametrize(("setting", "times"), [("1", 1), ("0", 2)])
def test_a_hosts_link_carries_each_byte_of_a_sum_once(setting, times, tmp_path):
    """Two hosts of two workers, the server on a third: a tensor each way for every host, not for every worker."""
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    env = clean_environment() | {"OMP_NUM_THREADS": "1"}
    with hosts.Hosts(["one", "two", "three"], tmp_path) as network:
        env |= {"PACELINE_REMOTE_SHELL": network.remote_shell(), "PACELINE_HOST_SUMS": setting}
        run = f"paceline run --servers three -H one:2,two:2 python {script}"
        subprocess.run(network.command("one", run), env=env, check=True, timeout=HANG_S)
        for host in ("one", "two"):
            for count in crossed(network, host):
                # With headers and acknowledgements, which a slow receiver makes as much as a tenth of it.
                assert count == pytest.approx(times * STEPS * 4 * ELEMENTS, rel=0.2), host
