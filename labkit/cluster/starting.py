"""`labkit.cluster.start`: from nothing to ranks with a process group."""

import importlib
import os
from typing import TYPE_CHECKING

from labkit.cluster import devices
from labkit.cluster.checks import check_choice, check_count, check_timeout
from labkit.cluster.keeping import Keeping, python_seat
from labkit.errors import PlanError

if TYPE_CHECKING:
    from labkit.cluster.ranks import Ranks

# Imported once by the keeper, shared by every forked rank. None of these starts a thread or touches CUDA.
PRELOAD = (
    "ipyparallel.engine.app",
    "labkit.cluster.engine",
    "torch",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "labkit.rank.worker",
    "labkit.rank.training",
)
MAX_RANKS = 256
START_TIMEOUT_S = 120.0
BACKENDS = (None, "nccl", "gloo")
LAUNCHERS = ("local",)
START_METHODS = ("fork", "spawn")


def start(
    num_ranks: int = 4,
    *,
    spares: int = 0,
    backend: str | None = None,
    launcher: str = "local",
    start_method: str | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> "Ranks":
    """Start ranks: one process each, pinned one per GPU over NCCL where there are enough, else CPU over gloo.

    Args:
        num_ranks: how many ranks.
        spares: processes kept ready to take the place of a rank that dies.
        backend: "nccl", "gloo", or None to choose.
        launcher: "local" (this machine).
        start_method: "fork" (imports are shared, the default) or "spawn" (where forking cannot be used).
        timeout_s: how long ranks may take to register.

    Raises:
        PlanError: an argument that cannot be.
        ClusterError: ranks did not start; none is left behind.
    """
    num_ranks = check_count("num_ranks", num_ranks, 1, MAX_RANKS)
    spares = check_count("spares", spares, 0, MAX_RANKS)
    check_choice("backend", backend, BACKENDS)
    check_choice("launcher", launcher, LAUNCHERS)
    method = start_method if start_method is not None else ("fork" if hasattr(os, "fork") else "spawn")
    check_choice("start_method", method, START_METHODS)
    if spares and method != "fork":
        raise PlanError(
            f"spares={spares} with start_method={method!r}: only forked processes are kept ready. Use spares=0."
        )
    timeout_s = check_timeout(timeout_s)
    threads = _num_threads(num_ranks)
    keeping = Keeping()
    try:
        preload = keeping.order("preload", env=_environment(threads), path=python_seat()["path"], modules=PRELOAD)
        # The notebook's half of ipyparallel is loaded while the keeper loads torch.
        crew_module = importlib.import_module("labkit.cluster.crew")
        ranks_module = importlib.import_module("labkit.cluster.ranks")
        chosen = devices.choose(num_ranks, backend)
        crew = crew_module.Crew(keeping, num_ranks, chosen, method, threads, timeout_s)
    except BaseException:
        keeping.stop()
        raise
    try:
        crew.boot(spares, preload)
        return ranks_module.Ranks(crew)
    except BaseException:
        crew.stop()
        raise


def _num_threads(num_ranks: int) -> int:
    """Threads that each rank computes with, so that all of them together fill the cores."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks) if hasattr(os, "sched_getaffinity") else 1


def _environment(num_threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(num_threads), "TORCH_FR_BUFFER_SIZE": "2000"}
