"""A relay between two ranks passes the handshake through and changes what follows: nothing of it is run."""

import contextlib
import os
import pickle
import re
import socket
import threading

import pytest
from jobs import HANG_S, Job

SCRIPT = """
import os, socket, time
import paceline.torch as hvd
if os.environ["RANK"] == "1":
    while socket.socket().connect_ex(("127.0.0.1", int(os.environ["PACELINE_PORT"]))):
        time.sleep(0.02)  # rank 0 has not begun to listen
    os.environ["PACELINE_PORT"] = os.environ["RELAY_PORT"]  # as where the network leads it astray
    os.environ["PACELINE_START_TIMEOUT"] = "20"  # it tries to reach the scheduler for that long
hvd.init()
for i in range(10):
    lists = hvd.allgather_object(["x" * 1000, hvd.rank()], name=f"all{i}")
    told = hvd.broadcast_object(["y" * 1000, i], name=f"from0.{i}")  # some on each server
    assert told == ["y" * 1000, i] and [each[1] for each in lists] == [0, 1], (told, lists)
print("done")
hvd.shutdown()
"""

_HANDSHAKE_BYTES = 76  # of the longer side


class _Relay:
    """Passes connections on to a port of this machine, with every read changed by `tamper`."""

    def __init__(self, tamper):
        self._tamper = tamper
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.target = None
        self.changed = 0  # reads that were changed
        self._sockets = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        for each in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:  # nobody listens yet; rank 1 tries again
                near.close()
                continue
            self._sockets += [near, far]
            for source, to in [(near, far), (far, near)]:
                threading.Thread(target=self._copy, args=(source, to), daemon=True).start()

    def _copy(self, source, to):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                after = self._tamper(data) if len(data) > _HANDSHAKE_BYTES else data
                assert len(after) == len(data)  # so that no length has to be changed with it
                self.changed += after != data
                to.sendall(after)
        for each in (source, to):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class _Command:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture
def relays(tmp_path):
    """(relay to the scheduler, relay to rank 0's server, file that exists when the relays' command has run).

    The first replaces the address of rank 0's server, in the roster for rank 1, by that of the second. That replaces
    every pickle that passes by one that runs a command.
    """
    ran = tmp_path / "ran"
    command = pickle.dumps(_Command(f"touch {ran}"), protocol=5)

    def replace_pickles(data):
        at = data.find(b"\x80\x05\x95")
        if at < 0 or at + len(command) > len(data):
            return data
        return data[:at] + command + data[at + len(command) :]

    server = _Relay(replace_pickles)

    def redirect(data):
        roster = data.find(b'"servers":[')
        address = re.search(rb"127\.0\.0\.1:(\d{5})", data[roster:]) if roster >= 0 else None
        if address is None:
            return data
        server.target = int(address[1])
        return data.replace(address[0], b"127.0.0.1:%d" % server.port)

    scheduler = _Relay(redirect)
    yield scheduler, server, ran
    scheduler.close()
    server.close()


@pytest.mark.parametrize("integrity", ["control", "all"])
def test_a_relay_that_rewrites_the_roster_and_pickles_gets_nothing_run(relays, tmp_path, port, integrity):
    scheduler, _, ran = relays
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    scheduler.target = port
    env = {"PACELINE_PORT": str(port), "RELAY_PORT": str(scheduler.port), "PACELINE_INTEGRITY": integrity}
    with Job(2, [script], tmp_path, **env) as job:
        job.processes[1].wait(HANG_S)
        job.kill(0)  # it waits for rank 1
        ended = job.wait()
    assert not ran.exists(), "rank 1 ran the relay's command"
    assert scheduler.changed, f"the relay met no roster: {ended}"
    assert ended[1].status != 0
    assert "integrity check failed" in ended[1].output, ended[1].output[-2000:]
    assert f"127.0.0.1:{scheduler.port}" in ended[1].output, "the error names no peer"
