"""Ranks without a notebook: a few forked processes with a gloo group over loopback, for tests of `labkit.rank` alone.

`run(function, num_ranks, *args)` starts a fresh Python (so that nothing is forked from a process with threads), which
imports torch, forks the ranks, and calls `function(*args)` in each. Results come back in rank order. Whatever happens,
no process outlives the call.
"""

import gc
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class RanksFailed(AssertionError):
    """A rank raised, died or did not end in time."""


def run(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 480.0) -> list[Any]:
    """Call a module-level function of a test file in every rank; returns the results in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job")
        job.write_bytes(
            pickle.dumps((function.__code__.co_filename, function.__qualname__, num_ranks, args, timeout_s))
        )
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        command = [sys.executable, "-W", "error", str(Path(__file__).resolve()), folder]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            process.wait(timeout_s + 60)
        except subprocess.TimeoutExpired:
            raise RanksFailed(f"the ranks did not end within {timeout_s + 60:g} s") from None
        finally:
            _end_session(process)
        return _results(Path(folder), num_ranks)


def _end_session(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _results(folder: Path, num_ranks: int) -> list[Any]:
    """What every rank returned; else the failures of all, those first that are no consequence of another death."""
    values, failures = [], []
    for rank in range(num_ranks):
        path = folder / str(rank)
        if path.exists():
            is_ok, value = pickle.loads(path.read_bytes())
        else:
            is_ok, value = False, "left no result: it died or was ended after the time limit"
        values.append(value)
        if not is_ok:
            failures.append(f"rank {rank}:\n{value}")
    if failures:
        raise RanksFailed("\n".join(sorted(failures, key=lambda text: "Connection closed by peer" in text)))
    return values


def _serve(folder: Path) -> None:
    """Runs in the fresh Python: forks the ranks and waits for them."""
    import labkit.rank.training  # noqa: F401  torch and what trains, once for all ranks

    file, name, num_ranks, args, timeout_s = pickle.loads(Path(folder, "job").read_bytes())
    function = _load(file, name)
    gc.freeze()  # a rank's collections need not look at what torch imported
    pids = []
    try:
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                _be_rank(folder, rank, num_ranks, function, args)
            pids.append(pid)
        _wait(pids, time.monotonic() + timeout_s)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _load(file: str, name: str) -> Callable[..., Any]:
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _wait(pids: list[int], deadline: float) -> None:
    """Until all ranks ended; one that ended in failure ends the wait, for the others may wait for it."""
    running = list(pids)
    while running and time.monotonic() < deadline:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                pids.remove(pid)
                if status:
                    deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.01)


def _be_rank(folder: Path, rank: int, num_ranks: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    status = 1
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder, "store")), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        outcome = (True, function(*args))
        status = 0
    except BaseException:
        outcome = (False, traceback.format_exc())
    part = Path(folder, f"{rank}.part")
    part.write_bytes(pickle.dumps(outcome))
    part.rename(Path(folder, str(rank)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
