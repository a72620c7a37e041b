"""How the keeper ends what it started, and what that started in turn."""

import contextlib
import ctypes
import glob
import os
import sys
import time
from collections.abc import Iterator

import psutil

_PR_SET_CHILD_SUBREAPER = 36
# multiprocessing's resource trackers remove shared memory when the process they serve is gone: let them.
TRACKER_GRACE_S = 0.3
END_TIMEOUT_S = 8.0


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that none escapes (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> Iterator[tuple[int, int]]:
    """Collect every child that has ended: (pid, wait status)."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def end_session(leader: int) -> None:
    """End what a dead child left behind in its session (data loader workers and the like), and its shared memory."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == leader and not _is_tracker(process):
                process.kill()
    _remove_shared_memory(leader)


def end_descendants(children: list[int]) -> None:
    """End every descendant of this process: the children first, trackers last; returns when none is left.

    `children` are those started here, for the shared memory that their pids name.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    trackers_until = time.monotonic() + TRACKER_GRACE_S
    while time.monotonic() < deadline:
        for _ in reap():
            pass
        left = psutil.Process().children(recursive=True)
        if not left:
            break
        for process in left:
            with contextlib.suppress(psutil.Error):
                if time.monotonic() > trackers_until or not _is_tracker(process):
                    process.kill()
        time.sleep(0.01)
    for pid in children:
        _remove_shared_memory(pid)


def _is_tracker(process: psutil.Process) -> bool:
    return any("resource_tracker" in part for part in process.cmdline())


def _remove_shared_memory(pid: int) -> None:
    for path in glob.glob(f"/dev/shm/torch_{pid}_*"):
        with contextlib.suppress(OSError):
            os.unlink(path)
