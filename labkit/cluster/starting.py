"""`labkit.cluster.start`: from nothing to ranks with a process group."""

import os
from typing import Any

from labkit.cluster import devices
from labkit.cluster.checks import check_count, check_timeout
from labkit.cluster.crew import Crew
from labkit.cluster.ranks import Ranks
from labkit.errors import PlanError

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
) -> Ranks:
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
    _check_choice("backend", backend, BACKENDS)
    _check_choice("launcher", launcher, LAUNCHERS)
    method = start_method if start_method is not None else ("fork" if hasattr(os, "fork") else "spawn")
    _check_choice("start_method", method, START_METHODS)
    chosen = devices.choose(num_ranks, backend)
    crew = Crew(num_ranks, chosen, method, check_timeout(timeout_s))
    try:
        crew.boot(spares)
        return Ranks(crew)
    except BaseException:
        crew.stop()
        raise


def _check_choice(name: str, value: Any, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise PlanError(f"{name}={value!r} is not one of {known}.")
