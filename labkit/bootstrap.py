"""Set labkit up and run one of its commands: `python3 labkit/bootstrap.py lab | test | check | bench | setup`.

Runs under the system's Python with the standard library only. Old interpreters must be able to parse this file, so that
they can say in one line what is missing; everything else is in `installation`.
"""

import os
import shutil
import subprocess
import sys

OLDEST = (3, 11)
NEWEST = (3, 13)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

if __name__ == "__main__":
    sys.path[0] = ROOT  # not labkit/, whose modules would stand in for the standard library's


def other_python() -> "str | None":
    """The path of a fitting Python beside this one, or None."""
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        path = shutil.which("python3.%d" % minor)
        works = "import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, %d))" % minor
        if path and subprocess.call([path, "-c", works], stderr=subprocess.DEVNULL) == 0:
            return path
    return None


def choose_python() -> None:
    """Go on under a fitting Python where this one does not fit; refuse where there is none."""
    found = sys.version_info[:2]
    if OLDEST <= found <= NEWEST:
        return
    path = other_python()
    if path:
        os.execv(path, [path, os.path.abspath(__file__)] + sys.argv[1:])  # noqa: RUF005
    if found < OLDEST:
        sys.exit(
            "labkit: this is Python %d.%d and labkit needs 3.11, 3.12 or 3.13: install one of them, then "
            "`PYTHON=python3.12 make lab` (with its own name or path)." % found
        )
    sys.stderr.write("labkit: Python %d.%d is newer than those labkit is meant for (3.11 to 3.13); trying.\n" % found)


if __name__ == "__main__":
    choose_python()

from labkit import installation

if __name__ == "__main__":
    sys.exit(installation.main(sys.argv[1:]))
