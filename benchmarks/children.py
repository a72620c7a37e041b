"""Child processes of a benchmark: every read has a time limit, and none is left behind."""

import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Child:
    """A process in a session of its own whose lines are read with a time limit."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        self.started_s = time.monotonic()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by __exit__)
        self._process = subprocess.Popen(
            list(command),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        self._rest = b""

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for a clean end, then end whatever is left of the child's session."""
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(timeout=10)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def line(self, starts_with: str, timeout_s: float) -> tuple[str, float]:
        """The next line that starts so, and the seconds since the process was started.

        Raises:
            TimeoutError: no such line in time, with what the process wrote on standard error.
        """
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            while True:
                while b"\n" in self._rest:
                    line, self._rest = self._rest.split(b"\n", 1)
                    if line.startswith(starts_with.encode()):
                        return line.decode(), time.monotonic() - self.started_s
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError(f"no line {starts_with!r} within {timeout_s:g} s. {self.errors()}")
                chunk = os.read(self._process.stdout.fileno(), 65536)  # type: ignore[union-attr]
                if not chunk:
                    raise TimeoutError(f"the process ended without a line {starts_with!r}. {self.errors()}")
                self._rest += chunk

    def errors(self) -> str:
        """The end of the child's standard error."""
        self._errors.seek(0)
        return "Standard error ends:\n" + self._errors.read().decode(errors="replace")[-3000:]
