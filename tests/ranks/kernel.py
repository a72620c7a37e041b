"""A real Jupyter kernel in which a test runs cells."""

import os
import queue
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

START_TIMEOUT_S = 120.0
CELL_TIMEOUT_S = 120.0


@dataclass(slots=True, kw_only=True)
class Shown:
    """What a cell showed.

    Attributes:
        out: its text on stdout.
        err: its text on stderr.
        data: what it displayed, and its value, as MIME bundles.
        error: "" or the name of the exception.
        message: the exception's text.
        traceback: what the notebook shows of it.
    """

    out: str = ""
    err: str = ""
    data: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    message: str = ""
    traceback: str = ""


class Kernel:
    """A started kernel; `stop` ends it."""

    def __init__(self, folder: str) -> None:
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=folder, env={**os.environ, "PYTHONPATH": folder})
        self._client: BlockingKernelClient = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=START_TIMEOUT_S)

    def run(self, cell: str, *, interrupt_after: str = "") -> Shown:
        """Run a cell to its end; interrupt the kernel (as the stop button does) once it printed `interrupt_after`."""
        request = self._client.execute(cell, stop_on_error=False)
        shown = Shown()
        deadline = time.monotonic() + CELL_TIMEOUT_S
        while True:
            try:
                message = self._client.get_iopub_msg(timeout=1.0)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the cell did not end: {cell!r} showed {shown}") from None
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return shown
            _take(shown, message["msg_type"], message["content"])
            if interrupt_after and interrupt_after in shown.out:
                interrupt_after = ""
                self._manager.interrupt_kernel()

    def stop(self) -> None:
        """End the kernel and what its cells started."""
        self.run("ranks.stop()")
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()

    def processes(self) -> set[psutil.Process]:
        """The kernel and everything below it."""
        kernel = psutil.Process(self._manager.provisioner.pid)
        return {kernel, *kernel.children(recursive=True)}


def _take(shown: Shown, kind: str, content: dict[str, Any]) -> None:
    if kind == "stream":
        if content["name"] == "stdout":
            shown.out += content["text"]
        else:
            shown.err += content["text"]
    elif kind in ("display_data", "execute_result"):
        shown.data.append(content["data"])
    elif kind == "error":
        shown.error, shown.message = content["ename"], content["evalue"]
        shown.traceback = "\n".join(content["traceback"])
