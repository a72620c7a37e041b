"""What can be seen of a process from outside, when nothing inside it can answer."""

import os
import shutil
import subprocess
import sys

import psutil

PY_SPY_TIMEOUT_S = 2.0

_LETTERS = {
    psutil.STATUS_RUNNING: "R",
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "T",
    psutil.STATUS_ZOMBIE: "Z",
    psutil.STATUS_DISK_SLEEP: "D",
}


def state(pid: int) -> str:
    """The scheduler's letter for a process: R (uses a core, any thread), S (sleeps), T (stopped), D, Z, "" (gone)."""
    try:
        process = psutil.Process(pid)
        letter = _LETTERS.get(process.status(), "S")
        return "R" if letter == "S" and process.cpu_percent(0.05) > 20 else letter
    except psutil.Error:
        return ""


def describe(pid: int) -> str:
    """Where a process is, as far as py-spy may look (it needs the right to trace), else its state."""
    words = {"R": "it uses a core", "T": "it is stopped", "D": "it waits for a disk", "Z": "it has ended", "": "it is gone"}
    seen = words.get(state(pid), "it sleeps")
    frame = _main_frame(pid)
    return f"{seen}, in {frame}" if frame else seen


def _main_frame(pid: int) -> str:
    tool = os.path.join(os.path.dirname(sys.executable), "py-spy")
    command = [tool if os.path.exists(tool) else shutil.which("py-spy") or "py-spy", "dump", "--pid", str(pid)]
    try:
        dump = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    _, _, frames = dump.partition('"MainThread"')
    lines = frames.splitlines()[1:2]
    return lines[0].strip() if lines else ""
