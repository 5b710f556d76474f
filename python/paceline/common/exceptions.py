"""Paceline's exceptions, under the names that Horovod's scripts catch."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """An operation or the job failed: ranks submitted different tensors, a peer is lost, a rank did not submit in time.

    The message names the tensor, the ranks and the reason. After a mismatch or a stall the job can continue. After the
    loss of a peer call `shutdown()` and `init()` again.
    """


class NotInitializedError(HorovodInternalError, ValueError):
    """An operation was called before `init()` or after `shutdown()`.

    Horovod raises ValueError from `rank()` and HorovodInternalError from an operation: this is both.
    """

    def __init__(self, message: str = "Paceline has not been initialized; call hvd.init() first.") -> None:
        super().__init__(message)


class HostsUpdatedInterrupt(RuntimeError):
    """Ranks wait to join the job, or have to go: raised on every rank by `state.check_host_updates()` of hvd.elastic.

    skip_sync: nobody joins, so the ranks that stay need no new state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """For scripts that catch it. Never raised: Paceline links to no framework."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} is at version {version}, this build expects {installed_version}")
        self.name = name
        self.version = version
        self.installed_version = installed_version
