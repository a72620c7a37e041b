"""How the keeper ends what it started, and what that started in turn."""

import contextlib
import ctypes
import glob
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator

import psutil

_PR_SET_CHILD_SUBREAPER = 36
# multiprocessing's resource trackers remove shared memory when the process they serve is gone: let them.
TRACKER_GRACE_S = 0.3
END_TIMEOUT_S = 8.0
# Which start of which rank a process belongs to; what a rank starts inherits it.
SEAT_VARIABLE = "LABKIT_SEAT"


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


def end_session(leader: int, seat: str) -> None:
    """End what a dead child left behind (data loader workers and the like), and its shared memory.

    Those are known by the session of the child, or, where they left it, by the seat in their environment.
    """
    ended = [leader]
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            theirs = os.getsid(process.pid) == leader or (seat and process.environ().get(SEAT_VARIABLE) == seat)
            if theirs and not _is_tracker(process):
                process.kill()
                ended.append(process.pid)
    remove_shared_memory(ended)


def end_descendants(children: list[int]) -> None:
    """End every descendant of this process: the children first, trackers last; returns when none is left.

    `children` are those started here, for the shared memory that their pids name.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    trackers_until = time.monotonic() + TRACKER_GRACE_S
    ended, mapped = set(children), set()
    while time.monotonic() < deadline:
        for _ in reap():
            pass
        left = psutil.Process().children(recursive=True)
        if not left:
            break
        for process in left:
            with contextlib.suppress(psutil.Error):
                if process.pid not in ended:
                    mapped |= nccl_files(process.pid)
                if time.monotonic() > trackers_until or not _is_tracker(process):
                    process.kill()
                    ended.add(process.pid)
        time.sleep(0.01)
    remove_shared_memory(ended)
    remove_files(mapped)


def end_orphans(seats: set[str], sessions: set[int]) -> None:
    """End what the keeper's children had started, where it was killed and can do it no more.

    Args:
        seats: the ranks' seats: what they started carries them in its environment.
        sessions: pids of the keeper's children, each of which led a session.
    """
    now_s = time.time()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            theirs = os.getsid(process.pid) in sessions or process.environ().get(SEAT_VARIABLE) in seats
            if theirs and process.create_time() <= now_s and not _is_tracker(process):
                process.kill()
    remove_shared_memory(sessions)


def nccl_files(pid: int) -> set[str]:
    """The shared memory files of NCCL that a process maps: they stay when it is killed, and carry no pid."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            return set(re.findall(r"/dev/shm/nccl-\S+", maps.read()))
    except OSError:
        return set()


def remove_shared_memory(pids: Iterable[int]) -> None:
    """Remove torch's shared memory files of processes that have ended; their pids stand in the names."""
    for pid in pids:
        remove_files(glob.glob(f"/dev/shm/torch_{pid}_*"))


def remove_files(paths: Iterable[str]) -> None:
    """Remove files that may be gone already."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _is_tracker(process: psutil.Process) -> bool:
    return any("resource_tracker" in part for part in process.cmdline())
