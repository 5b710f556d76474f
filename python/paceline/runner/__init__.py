"""Runs a function in the processes of a job on this host: `horovod.run`, or `paceline.runner.run`."""

from __future__ import annotations

import contextlib
import operator
import os
import shutil
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

from paceline._absent import explain_absent_names, instead

_END_S = 20  # more than the launcher gives its ranks


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Runs func(*args, **kwargs) in num_proc processes of one job, and returns their results in the order of ranks.

    The arguments are those of horovod.run. The function, its arguments and results are pickled by cloudpickle, and lie
    in a directory that only this user can read. It calls hvd.init() itself. hosts: this one, such as "localhost:4".
    output_filename: directory for each rank's output. executable: the workers' Python. np, min_np, max_np and
    network_interface are deprecated names; ssh_port, ssh_identity_file, disable_cache, use_gloo, use_mpi and mpi_args
    have no effect.

    Raises RuntimeError with the traceback of a rank that failed; NotImplementedError for other hosts and for elastic
    training; ValueError for arguments that contradict each other, and for a num_proc that is no number from 1.
    """
    for name, value, new in (
        ("np", np, "num_proc"),
        ("min_np", min_np, "min_num_proc"),
        ("max_np", max_np, "max_num_proc"),
    ):
        if value is not None:
            warnings.warn(f"{name} is deprecated, use {new} instead", DeprecationWarning, stacklevel=2)
    if network_interface:
        warnings.warn(
            "network_interface is deprecated, use network_interfaces instead", DeprecationWarning, stacklevel=2
        )
    if hosts is not None and hostfile is not None:
        raise ValueError("give hosts or hostfile, not both")
    if use_gloo and use_mpi:
        raise ValueError("give use_gloo or use_mpi, not both")
    elastic: dict[str, Any] = {
        "min_num_proc": min_num_proc if min_np is None else min_np,
        "max_num_proc": max_num_proc if max_np is None else max_np,
        "slots": slots,
        "reset_limit": reset_limit,
        "cooldown_range": cooldown_range,
        "host_discovery_script": host_discovery_script,
    }
    for name, given in elastic.items():
        if given is not None:
            raise NotImplementedError(f"{name}={given!r} is for elastic training: {instead('runner.elastic')}")
    if hostfile is not None or not _here(hosts):
        raise NotImplementedError(
            f"functions run on this host, not on {hostfile or hosts}: for others start a script with "
            "`paceline run -H host1:2,host2:2 python script.py`"
        )
    processes = num_proc if np is None else np
    if not isinstance(processes, SupportsIndex) or operator.index(processes) < 1:
        raise ValueError(f"num_proc={processes!r}: allowed are whole numbers from 1")
    flags = ["-np", str(processes)]
    for flag, text in (
        ("--hosts", hosts),
        ("--start-timeout", start_timeout),
        ("--output-filename", output_filename),
        ("--network-interfaces", network_interface or ",".join(network_interfaces or ())),
    ):
        flags += [flag, str(text)] if text else []
    flags += ["--verbose"] if verbose else []
    return _run(lambda: func(*args, **(kwargs or {})), flags, executable or sys.executable)


def _here(hosts: str | None) -> bool:
    own = {"localhost", "127.0.0.1", "::1", socket.gethostname()}
    return hosts is None or all(host.strip().partition(":")[0] in own for host in hosts.split(","))


def _run(call: Callable[[], Any], flags: list[str], python: str) -> list[Any]:
    """The processes exchange files with this one: call, and of each rank result.RANK or failed.RANK (__main__.py)."""
    import cloudpickle  # type: ignore[import-untyped]  # here, because `import horovod` needs none of it

    command = shutil.which(
        "paceline", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    )
    if command is None:
        raise RuntimeError("the command paceline is not on the PATH: install the package into this environment")
    with tempfile.TemporaryDirectory(prefix="paceline-run-") as directory:
        (Path(directory) / "call").write_bytes(cloudpickle.dumps(call))
        code = _finish(
            # Its input ends with this process, however that ends. In a session of its own Ctrl-C reaches it once.
            subprocess.Popen(
                [command, "run", "--until-input-ends", *flags, python, "-m", "paceline.runner", directory],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(_search_path(python))},
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        )
        failed = min(Path(directory).glob("failed.*"), key=lambda path: path.stat().st_mtime_ns, default=None)
        if failed is not None:
            raise RuntimeError(f"rank {failed.suffix[1:]} failed:\n{failed.read_text()}")
        if code:
            raise RuntimeError(f"the job ended with exit code {code}; its output says why")
        results = sorted(Path(directory).glob("result.*"), key=lambda path: int(path.suffix[1:]))
        return [cloudpickle.loads(path.read_bytes()) for path in results]


def _search_path(python: str) -> list[str]:
    """Where the processes look for modules: where this one does. Another interpreter has its own packages."""
    paths = [path or os.getcwd() for path in sys.path]
    if python == sys.executable:
        return paths
    library = sysconfig.get_path("stdlib")
    archive = os.path.join(os.path.dirname(library), "python{}{}.zip".format(*sys.version_info))
    own = (library, sysconfig.get_path("platstdlib"), archive, *site.getsitepackages(), site.getusersitepackages())
    return [path for path in paths if not path.startswith(own)]


def _finish(job: subprocess.Popen[bytes]) -> int:
    """Waits for a job's end. At an exception, such as Ctrl-C, its ranks have some seconds to end by themselves."""
    try:
        return job.wait()
    except BaseException as e:
        job.send_signal(signal.SIGINT if isinstance(e, KeyboardInterrupt) else signal.SIGTERM)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(_END_S)
        finally:
            job.kill()  # at a second Ctrl-C
            job.wait()
        raise
    finally:
        if job.stdin is not None:
            job.stdin.close()


explain_absent_names(__name__)
