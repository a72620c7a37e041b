"""What can be seen of a process from outside, when nothing inside it can answer."""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

PY_SPY_TIMEOUT_S = 2.0
NUM_LOOKS = 5
LOOK_S = 0.01

_LETTERS = {
    psutil.STATUS_RUNNING: "R",
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "T",
    psutil.STATUS_ZOMBIE: "Z",
    psutil.STATUS_DISK_SLEEP: "D",
}

_WORDS = {
    "R": "it uses a core",
    "T": "it is stopped",
    "D": "it waits for a disk",
    "Z": "it has ended",
    "": "it is gone",
}


def state(pid: int) -> str:
    """The scheduler's letter for a process: R (uses a core, any thread), S (sleeps), T (stopped), D, Z, "" (gone)."""
    try:
        process = psutil.Process(pid)
        letter = _LETTERS.get(process.status(), "S")
        return "R" if letter == "S" and process.cpu_percent(0.05) > 20 else letter
    except psutil.Error:
        return ""


def wants_core(pid: int, thread: int) -> bool:
    """Whether a thread runs or queues for a core each time one looks; a wait for the GIL is sleep."""
    for _ in range(NUM_LOOKS):
        try:
            with open(f"/proc/{pid}/task/{thread}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] != "R":
                    return False
        except OSError:
            return False
        time.sleep(LOOK_S)
    return True


def crowding() -> float:
    """How many runnable processes there are for each core, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def describe(pids: dict[int, int]) -> dict[int, str]:
    """Where the process of each rank is, as far as py-spy may look (it needs the right to trace), else its state."""
    if not pids:
        return {}
    with ThreadPoolExecutor(len(pids), thread_name_prefix="labkit-probe") as pool:
        return dict(zip(pids, pool.map(_describe, pids.values()), strict=True))


def _describe(pid: int) -> str:
    seen = _WORDS.get(state(pid), "it sleeps")
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
