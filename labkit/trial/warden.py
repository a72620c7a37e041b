"""Stands over an arena where there is no sandbox: whatever it starts ends with it.

`python -m labkit.trial.warden PROGRAM ARGUMENT...` runs the program, and when that ends, or its own parent does, or on
SIGTERM, ends every process that came of it. A program that kills the warden itself gets away from it.
"""

import ctypes
import os
import signal
import subprocess
import sys
from typing import NoReturn

from labkit.cluster import ending

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the program of the command line."""
    parent = os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    ending.become_subreaper()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    status = 1
    try:
        if os.getppid() == parent:
            status = subprocess.Popen(sys.argv[1:]).wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        ending.end_descendants([])
        os._exit(status & 0xFF)


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
