"""Files of `/dev/shm` that a test may have left: not those that other programs, or the suite's other half, use now."""

import contextlib
import os
import pathlib

import psutil

FOLDER = pathlib.Path("/dev/shm")


def files() -> set[str]:
    """The names of all files."""
    return set(os.listdir(FOLDER))


def left_since(before: set[str]) -> set[str]:
    """Files that are new since then, without those that live processes outside this one's descendants have mapped."""
    new = files() - before
    if not new:
        return new
    ours = {os.getpid(), *(one.pid for one in psutil.Process().children(recursive=True))}
    for pid in set(psutil.pids()) - ours:
        new -= _mapped(pid, new)
    return new


def _mapped(pid: int, names: set[str]) -> set[str]:
    with contextlib.suppress(OSError):
        maps = pathlib.Path(f"/proc/{pid}/maps").read_text(errors="replace")
        return {name for name in names if f"{FOLDER}/{name}" in maps}
    return set()
