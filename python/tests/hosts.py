"""Hosts for tests: network namespaces, one per host, that are joined by a bridge and removed at the end.

Each has an address and a host name that the others resolve, and no other network. Needs root and iproute2.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

NETWORK = "10.77.0"  # not visible outside the namespaces


def available():
    """Why this machine cannot have such hosts, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "network namespaces need the system package iproute2"
    return None


class Hosts:
    """Makes the named hosts and removes them at the end of the `with`. folder: for the remote shell.

    own: what each resolves its own name to, if not its address: 127.0.1.1 on Debian's.
    Within it SIGTERM and SIGHUP end the process by SystemExit, so that they are removed then too.
    """

    def __init__(self, names, folder, own=None):
        self.names = list(names)
        self._own = own
        self.folder = Path(folder)
        self._switch = self._namespace("switch")

    def __enter__(self):
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # no other may
            self._before = {number: signal.signal(number, _ends) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        for name in [*self.names, "switch"]:
            subprocess.run(["ip", "netns", "del", self._namespace(name)], check=False, stderr=subprocess.DEVNULL)
            shutil.rmtree(f"/etc/netns/{self._namespace(name)}", ignore_errors=True)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def command(self, host, script):
        """The command line that runs a shell script on the host, with this process's environment."""
        named = f'echo {host} >/proc/sys/kernel/hostname && exec sh -c "$1"'
        return ["ip", "netns", "exec", self._namespace(host), "unshare", "--uts", "sh", "-c", named, "sh", script]

    def remote_shell(self):
        """A substitute for ssh: its arguments are the host and a shell command, which has a login's environment."""
        program = self.folder / "remote-shell"
        lines = [
            "#!/bin/sh",
            "host=$1",
            "shift",
            "login='env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin'",
            "case $host in",
        ]
        for name in self.names:
            lines.append(f"{name}) exec $login {' '.join(map(_quoted, self.command(name, '$*')))} ;;")
        lines += ["esac", 'echo "no host $host" >&2', "exit 1", ""]
        program.write_text("\n".join(lines))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return str(program)

    def unplug(self, host):
        """Takes the host's link down. Nobody is told."""
        _run("ip", "-n", self._switch, "link", "set", f"port{self.names.index(host) + 1}", "down")

    def _namespace(self, name):
        return f"paceline-{os.getpid()}-{name}"

    def _make(self):
        addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(self.names, 1)}
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(addresses.items(), 1):
            space = self._namespace(name)
            _run("ip", "netns", "add", space)
            hosts = Path("/etc/netns", space, "hosts")  # what `ip netns exec` mounts over /etc/hosts
            hosts.parent.mkdir(parents=True)
            known = addresses | ({name: self._own} if self._own else {})
            hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{known[other]} {other}\n" for other in known))
            port = f"port{number}"
            _run("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self._switch)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")


def _ends(number, _):
    sys.exit(128 + number)


def _run(*command):
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _quoted(word):
    """The word, quoted for a shell script; "$*" is not escaped."""
    return '"$*"' if word == "$*" else "'" + word.replace("'", "'\\''") + "'"
