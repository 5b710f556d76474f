"""The functions that every framework's module has: the job, its timeline, and this build's capabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline._absent import explain_absent_names
from paceline.common.engine import engine
from paceline.common.exceptions import HorovodInternalError
from paceline.common.process_sets import ProcessSet, check_process_set, register_process_sets
from paceline.common.seat import seat

shutdown = engine.shutdown
is_initialized = engine.is_initialized
rank = engine.rank
size = engine.size
local_rank = engine.local_rank
local_size = engine.local_size
cross_rank = engine.cross_rank
cross_size = engine.cross_size
is_homogeneous = engine.is_homogeneous
start_timeline = engine.start_timeline
stop_timeline = engine.stop_timeline
tally = engine.tally
supersteps = engine.supersteps


def init(
    comm: Iterable[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Joins the job that the environment names, and waits for all its ranks.

    A launcher (`paceline run`, torchrun, mpirun, srun) names the job and the rank in the environment. Without one the
    process is a job of its own. A second call while running only checks its arguments.

    comm: None, or a list of all ranks. process_sets: sets to register, the same on all ranks; "dynamic" is accepted
    without effect, since sets can always be added later. settings: override environment variables, such as
    {"sync": "ssp:3", "partition_bytes": 1 << 20} for PACELINE_SYNC and PACELINE_PARTITION_BYTES. Raises ValueError for
    wrong arguments or settings, HorovodInternalError if the job does not form in time.
    """
    if comm is not None and not isinstance(comm, Iterable):
        raise ValueError(f"init(comm={comm!r}): Paceline has no MPI communicators; leave comm out")
    dynamic = isinstance(process_sets, str) and process_sets.lower() == "dynamic"
    if isinstance(process_sets, str) and not dynamic:
        raise ValueError(f'init(process_sets={process_sets!r}): give a list of process sets, or "dynamic"')
    wanted = [] if isinstance(process_sets, str) else list(process_sets or [])
    for process_set in wanted:
        check_process_set(process_set)
    running = engine.is_initialized()
    if running and settings:
        raise ValueError(f"init(settings={settings!r}) is too late: the job runs already; call shutdown() first")
    sets = [list(process_set.ranks or []) for process_set in wanted]
    try:
        if seat.elastic and not running:
            seat.join(sets, settings)
        else:
            engine.init(sets, settings)
    except (ValueError, HorovodInternalError) as e:
        # Every rank prints it, and the frames of this package say nothing to users.
        raise e.with_traceback(None) from None
    try:
        _check_ranks(comm)
        if wanted:
            register_process_sets(wanted)
    except ValueError:
        if not running:
            engine.shutdown()
        raise


def rejoin() -> None:
    """Leaves the job and joins it again, with the settings that `init()` was given: after a change of its ranks."""
    shutdown()
    init(settings=seat.settings)


def _check_ranks(comm: Iterable[int] | None) -> None:
    ranks = sorted(comm or [])
    if ranks and ranks != list(range(engine.size())):
        raise ValueError(
            f"init(comm={ranks}) names other ranks than the job's {engine.size()}: a job has all ranks that were "
            "started; for a part of them use a process set"
        )


def paceline_built() -> bool:
    """True: this is Paceline."""
    return True


def mpi_enabled() -> bool:
    """False: Paceline runs under mpirun but sends nothing through MPI."""
    return False


def mpi_built(verbose: bool = False) -> bool:
    """False: there is no MPI in Paceline."""
    return False


def mpi_threads_supported() -> bool:
    """Raises ValueError, as Horovod does where MPI is not enabled."""
    raise ValueError("MPI is not enabled: Paceline sends nothing through it")


def gloo_enabled() -> bool:
    """True: scripts ask this to learn whether collectives on CPU tensors work, and they do."""
    return True


def gloo_built(verbose: bool = False) -> bool:
    """True: scripts ask this to learn whether collectives on CPU tensors exist, and they do, without Gloo."""
    return True


def nccl_built(verbose: bool = False) -> int:
    """0: tensors on CUDA devices travel through host memory, not through NCCL."""
    return 0


def ddl_built(verbose: bool = False) -> bool:
    """False: there is no IBM DDL in Paceline."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """False: there is no oneCCL in Paceline."""
    return False


def cuda_built() -> bool:
    """False: nothing is compiled against CUDA. CUDA tensors work through PyTorch's own copies."""
    return False


def rocm_built() -> bool:
    """False: nothing is compiled against ROCm."""
    return False


explain_absent_names(__name__)
