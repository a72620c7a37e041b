"""A rank's process around its agent: the ipyparallel engine that takes the calls."""

import importlib
import json
import os
import random
import sys
from typing import Any

from ipyparallel.engine.app import IPEngine


def _skip_debugger() -> None:
    """Load ipykernel's debugger without debugpy: nobody attaches one here, and loading it costs every rank 0.1 s."""
    if "debugpy" in sys.modules:
        return
    sys.modules["debugpy"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("ipykernel.debugger")
    finally:
        del sys.modules["debugpy"]


_skip_debugger()


def run(seat: dict[str, Any]) -> None:
    """Become the rank of this seat: environment first, then the agent, then the engine's loop until the process ends.

    Args:
        seat: rank, uuid, env, cwd, path, key, hub_host, hub_port, num_threads and the engine's `argv` and `connection`.
    """
    os.environ.update(seat["env"])
    os.chdir(seat["cwd"])
    sys.path[:] = seat["path"]
    random.seed()  # forked processes would all draw the same numbers
    importlib.import_module("labkit.rank.worker").begin(seat)
    # Not through the environment, which the rank's own subprocesses inherit.
    IPEngine.launch_instance(argv=seat["argv"], connection_info_env=seat["connection"])


if __name__ == "__main__":
    run(json.loads(sys.stdin.readline()))
