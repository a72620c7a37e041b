"""What a rank's agent measures of its own process: whether it computes or waits, memory, stacks."""

import sys
import threading
import time
import traceback

import psutil

# Below this share of a core the process counts as waiting. Time spent waiting for a core counts as computing.
WAITING_SHARE = 0.1


class Vitals:
    """How long the process has been waiting, looked at again and again by the agent's thread."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._main = threading.main_thread().native_id
        self._seen_s = time.monotonic()
        self._busy_s = self._busy()
        self.waiting_s = 0.0

    def look(self) -> None:
        """Bring `waiting_s` up to date: seconds since the process last used (or queued for) a core."""
        now, busy = time.monotonic(), self._busy()
        passed = now - self._seen_s
        if passed < 0.05:
            return
        waiting = busy - self._busy_s < WAITING_SHARE * passed
        self.waiting_s = self.waiting_s + passed if waiting else 0.0
        self._seen_s, self._busy_s = now, busy

    def began(self) -> None:
        """A call begins: waiting of an idle rank does not count."""
        self.waiting_s = 0.0

    def _busy(self) -> float:
        """Seconds of CPU of the whole process, and of its main thread in the queue for a core."""
        queued = 0.0
        try:
            with open(f"/proc/self/task/{self._main}/schedstat") as file:
                queued = int(file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            pass  # no scheduler statistics on this kernel or platform
        return time.process_time() + queued

    def memory_bytes(self) -> int:
        """Resident memory of the process."""
        return int(self._process.memory_info().rss)


def main_stack() -> list[str]:
    """The frames of the main thread, innermost last, as `function (file:line)`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return []
    return [f"{one.name} ({one.filename}:{one.lineno})" for one in traceback.extract_stack(frame)]
