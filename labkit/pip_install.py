"""Run pip and show one line of progress. Standard library only: it works before anything is installed."""

import collections
import os
import pathlib
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

__all__ = ["InstallError", "Progress", "explain", "repair", "run"]

MIB = 1 << 20
TTY_PERIOD_S = 0.2
LOG_PERIOD_S = 15.0

_COLLECTING = re.compile(r"^(?:Collecting|Requirement already satisfied:) ([A-Za-z0-9._-]+)")
_DOWNLOADING = re.compile(
    r"^\s*(?:Downloading|Processing) (?:\S*/)?([A-Za-z0-9_.]+?)-([0-9][^-\s]*?)(?:-\S*|\.tar\.gz)"
)
_BYTES = re.compile(r"^\s*Progress (\d+) of (\d+)")
_BUILDING = re.compile(r"^\s*Building (?:editable|wheel)s? for ([A-Za-z0-9._-]+)")
_INSTALLING = re.compile(r"^Installing collected packages: (.*)")
_WIDTH = 100


class InstallError(Exception):
    """pip ended with an error; the text is one line that says why and what to do."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """What pip has said so far, fed line by line.

    Attributes:
        expected: how many packages there will be, roughly.
        phase: "starting", "finding", "downloading", "building" or "installing".
        what: the package at hand.
        seen: packages found so far.
        done_bytes: how much of the download at hand has arrived.
        total_bytes: how large that download is; 0 when unknown.
        to_install: how many packages this call of pip installs.
    """

    expected: int
    phase: str = "starting"
    what: str = "pip"
    seen: set[str] = field(default_factory=set)
    done_bytes: int = 0
    total_bytes: int = 0
    to_install: int = 0

    def feed(self, line: str) -> None:
        """Take one line of pip's output."""
        if match := _BYTES.match(line):
            self.phase = "downloading"
            self.done_bytes, self.total_bytes = int(match[1]), int(match[2])
            return
        if match := _COLLECTING.match(line):
            self.phase, self.what = "finding", match[1]
            self.seen.add(match[1].lower().replace("_", "-"))
        elif match := _DOWNLOADING.match(line):
            self.phase, self.what = "downloading", f"{match[1]} {match[2]}"
        elif match := _BUILDING.match(line):
            self.phase, self.what = "building", match[1]
        elif match := _INSTALLING.match(line):
            self.to_install = len(match[1].split(","))
            self.phase, self.what = "installing", f"{self.to_install} packages"
        self.done_bytes = self.total_bytes = 0

    def text(self, *, elapsed_s: float, num_installed: int = 0) -> str:
        """The progress as one line.

        Args:
            elapsed_s: seconds since the install began.
            num_installed: packages already in place.
        """
        clock = f"{int(elapsed_s) // 60}:{int(elapsed_s) % 60:02d}"
        count = min(max(len(self.seen), num_installed), self.expected)
        size = f"  {self.done_bytes / MIB:.0f} of {self.total_bytes / MIB:.0f} MiB" if self.total_bytes >= MIB else ""
        return f"  {clock:>5}  [{count:3d} of about {self.expected}]  {self.phase} {self.what}{size}"[:_WIDTH]


def explain(output: Sequence[str]) -> str:
    """Say in one line why pip failed, from its output.

    >>> explain(["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"])
    'The disk is full: pip could not write its files. Free some space, then run the same command again.'
    """
    text = "\n".join(output)
    if "No space left on device" in text or "Errno 28" in text:
        return "The disk is full: pip could not write its files. Free some space, then run the same command again."
    network = ("NewConnectionError", "Name or service not known", "name resolution", "Network is unreachable")
    if any(sign in text for sign in (*network, "ReadTimeoutError", "Connection refused", "ProxyError")):
        return "The package index cannot be reached: check the network or proxy, then run the same command again."
    errors = [line.strip() for line in output if line.lstrip().lower().startswith("error:")]
    why = errors[-1].split(":", 1)[1].strip() if errors else (output[-1].strip() if output else "it said nothing")
    return f"pip could not install everything: {why}"


def repair(site_packages: pathlib.Path) -> list[str]:
    """Forget packages that a killed pip left half installed, so that it installs them again.

    pip writes a package's RECORD last: a `.dist-info` without one is half a package that pip takes for a whole one.

    Returns:
        The names of the packages forgotten.
    """
    forgotten = []
    for info in sorted(site_packages.glob("*.dist-info")):
        if not (info / "RECORD").exists():
            for path in sorted(info.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            info.rmdir()
            forgotten.append(info.name.split("-")[0])
    return forgotten


def run(
    python: pathlib.Path,
    arguments: Sequence[str],
    *,
    log: pathlib.Path,
    expected: int,
    started_s: float,
    count_installed: Callable[[], int],
) -> None:
    """Run `pip install` with these arguments and show its progress on one line.

    Args:
        python: the interpreter to install for.
        arguments: what follows `pip install`.
        log: file that pip's whole output is appended to.
        expected: how many packages the environment will have, roughly.
        started_s: `time.monotonic()` when the whole set-up began.
        count_installed: says how many packages are in place.

    Raises:
        InstallError: pip ended with an error.
    """
    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    lines: queue.Queue[str | None] = queue.Queue()
    tail: collections.deque[str] = collections.deque(maxlen=200)
    with log.open("a", encoding="utf-8") as record:
        record.write("$ " + " ".join(command) + "\n")
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            errors="replace",
        )
        reader = threading.Thread(target=_read, args=(pip, lines, record, tail), daemon=True)
        reader.start()
        try:
            _follow(lines, Progress(expected=expected), started_s, count_installed)
        finally:
            if pip.poll() is None:
                pip.terminate()
            code = pip.wait()
            reader.join()
            if pip.stdout:
                pip.stdout.close()
    if code != 0:
        raise InstallError(f"{explain(list(tail))} (all that pip said: {log})")


def _read(
    pip: subprocess.Popen[str], lines: queue.Queue[str | None], record: TextIO, tail: collections.deque[str]
) -> None:
    """Pass pip's lines on until it ends; progress counters do not go to the log."""
    for line in pip.stdout or ():
        lines.put(line)
        if not _BYTES.match(line):
            record.write(line)
            tail.append(line)
    lines.put(None)


def _follow(
    lines: queue.Queue[str | None], progress: Progress, started_s: float, count_installed: Callable[[], int]
) -> None:
    """Draw the progress until the lines end: in place on a terminal, now and then elsewhere."""
    tty = sys.stdout.isatty()
    period_s = TTY_PERIOD_S if tty else LOG_PERIOD_S
    next_s = 0.0
    while True:
        now_s = time.monotonic()
        if now_s >= next_s:
            next_s = now_s + period_s
            installed = count_installed() if progress.phase == "installing" else 0
            text = progress.text(elapsed_s=now_s - started_s, num_installed=installed)
            print(f"\r\x1b[K{text}" if tty else text, end="" if tty else "\n", flush=True)
        try:
            line = lines.get(timeout=min(TTY_PERIOD_S, max(next_s - now_s, 0.01)))
        except queue.Empty:
            continue
        if line is None:
            break
        progress.feed(line)
    if tty:
        print("\r\x1b[K", end="", flush=True)
