"""Runs every command and every Python example of README.md and docs/.

A fenced block marked `sh` is a script that runs in the repository's root with the virtual environment first on the
PATH. Where it begins with `# on NAME` it runs on that host, a network namespace; host blocks with nothing but blank
lines between them belong together, and all but the last are services, which run until the last one has ended.

Blocks marked `python` run on two ranks, each in a script that has a model, an optimizer and data; where a block makes
another optimizer, that one trains.
"""

import functools
import json
import os
import re
import signal
import subprocess
import venv
from pathlib import Path

import hosts
import pytest
from jobs import HANG_S

ROOT = Path(__file__).parents[2]
NETWORK = ("host1", "host2", "host3", "host4")


DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]


def scenarios(document):
    """The document's commands, grouped: lists of (host or None, script)."""
    text = (ROOT / document).read_text()
    found, end = [], None
    for match in re.finditer(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        named = re.match(r"# on (\w+)\n", match[1])
        block = (named and named[1], match[1])
        adjoining = end is not None and not text[end : match.start()].strip()
        if adjoining and block[0] and found[-1][-1][0]:
            found[-1].append(block)
        else:
            found.append([block])
        end = match.end()
    return found


def title(scenario):
    return scenario[-1][1].strip().splitlines()[-1][:60]


def environment(home):
    """What a user's shell has: no variable of this test's own launcher or build."""
    ours = ("PACELINE_", "MAKE", "MFLAGS", "PYTEST", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env["HOME"] = str(home)
    return env


def unique(scenarios):
    """Each once, though several documents have it."""
    return [scenario for i, scenario in enumerate(scenarios) if scenario not in scenarios[:i]]


ALL = unique([scenario for document in DOCUMENTS for scenario in scenarios(document)])
LOCAL = [scenario for scenario in ALL if scenario[0][0] is None]
REMOTE = [scenario for scenario in ALL if scenario[0][0] is not None]


@pytest.mark.parametrize("scenario", LOCAL, ids=title)
def test_command_works_on_one_host(scenario, tmp_path):
    (_, script), env = scenario[0], environment(Path.home())
    if script == "make test\n":
        script = "make --dry-run test\n"  # this test is part of it
    if "pip install" in script:
        venv.create(tmp_path / "fresh", with_pip=True)
        env["PATH"] = f"{tmp_path}/fresh/bin:{env['PATH']}"
        script += "paceline --version && python -c 'import paceline'\n"
    run(["sh", "-euc", script], env)


@pytest.mark.skipif(hosts.available() is not None, reason=str(hosts.available()))
@pytest.mark.parametrize("scenario", REMOTE, ids=title)
def test_command_works_over_several_hosts(scenario, tmp_path):
    secret = tmp_path / "job.secret"
    secret.touch(mode=0o600)
    secret.write_text("a secret of this test\n")
    with hosts.Hosts(NETWORK, tmp_path) as network:
        # The hosts share this machine's cores, so a process takes one.
        env = environment(tmp_path) | {"PACELINE_REMOTE_SHELL": network.remote_shell(), "OMP_NUM_THREADS": "1"}
        *services, (host, script) = [(host, f"set -eu\n{script}") for host, script in scenario]
        started = [start(network.command(*service), env) for service in services]
        try:
            run(network.command(host, script), env)
            assert [service.poll() for service in started] == [None] * len(started), "a service ended before its job"
        finally:
            for service in started:
                stop(service)


EXAMPLES = [
    (document, number, block)
    for document in DOCUMENTS
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.M | re.S), 1)
]
BEFORE = """
import torch

import paceline
import paceline.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(64, 32)  # with more elements than codecs leave plain
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
plain = optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data, target = torch.randn(16, 64), torch.zeros(16, 32)
"""
AFTER = """
if optimizer is not plain:
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(data), target).backward()
        optimizer.step()
    if hasattr(optimizer, "agree"):
        optimizer.agree()
    ranks = hvd.allgather(next(model.parameters()).detach().flatten()[None])
    assert torch.equal(ranks[0], ranks[1]), "the ranks' parameters differ"
hvd.shutdown()
"""


@pytest.mark.parametrize(("document", "number", "block"), EXAMPLES, ids=[f"{d}-{n}" for d, n, _ in EXAMPLES])
def test_python_example_works_on_two_ranks(document, number, block, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(BEFORE + block + AFTER)
    env = environment(tmp_path) | {"OMP_NUM_THREADS": "1"}
    run(["paceline", "run", "-np", "2", "python", str(script)], env)


@functools.cache
def settings():
    """The names of all settings."""
    command = ["paceline", "info", "--json"]
    facts = subprocess.run(command, env=environment(Path.home()), capture_output=True, check=True)
    return {setting["name"] for setting in json.loads(facts.stdout)["settings"]}


def test_every_setting_is_documented():
    named = set(re.findall(r"\bPACELINE_[A-Z_]*[A-Z]\b", (ROOT / "docs/settings.md").read_text()))
    assert settings() <= named, f"docs/settings.md lacks {sorted(settings() - named)}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_only_files_that_exist(document):
    text, folder = (ROOT / document).read_text(), (ROOT / document).parent
    rooms = {path.name for path in ROOT.iterdir()} - {"build", "dist"}
    named = {name for name in re.findall(r"`([\w./-]+/[\w./-]+)`", text) if name.split("/")[0] in rooms}
    linked = set(re.findall(r"\]\(([^):#]+)\)", text))
    missing = {name for name in named if not (ROOT / name).exists()}
    missing |= {name for name in linked if not (folder / name).exists()}
    assert not missing, f"{document} names {sorted(missing)}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_only_settings_that_exist(document):
    named = set(re.findall(r"\bPACELINE_[A-Z_]*[A-Z]\b", (ROOT / document).read_text()))
    # Python and the glue read these, and the engine does not.
    known = settings() | {"PACELINE_TAKEOVER", "PACELINE_TENSORFLOW_SYNC", "PACELINE_LIBRARY"}
    assert named <= known, f"{document} names {sorted(named - known)}"


def start(command, env):
    return subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, start_new_session=True)


def stop(process):
    """Ends the process as Ctrl-C would, with all that it started."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def run(command, env):
    process = start(command, env)
    try:
        assert process.wait(timeout=HANG_S) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"no end after {HANG_S} s")
