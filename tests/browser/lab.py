"""JupyterLab as `make lab` starts it, on a copy of the lab, and what a test needs to know about its kernel."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import psutil
from jupyter_client import BlockingKernelClient

WAIT_S = 240.0
ENDS_TIMEOUT_S = 60.0
NOTEBOOK = "notebooks/00_start.ipynb"
ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)(\S*)\?token=(\w+)")


class Lab:
    """A running JupyterLab.

    Attributes:
        folder: what it serves: a copy, so that outputs are saved there and not in the repository.
        address: the page `make lab` would open, token included.
    """

    def __init__(self, folder: pathlib.Path, process: subprocess.Popen[str]) -> None:
        self.folder = folder
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        base, page, token = wait_for(self._announced, "the address of JupyterLab")
        self._base, self._token = base, token
        self.address = f"{base}{page}?token={token}"

    def sessions(self) -> list[dict[str, Any]]:
        """The server's own list of notebooks with kernels."""
        request = urllib.request.Request(
            f"{self._base}/api/sessions", headers={"Authorization": f"token {self._token}"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as answer:
            return json.load(answer)

    def idle_kernel(self) -> str | None:
        """The kernel of the notebook, once it is idle and the page is connected to it.

        The page says "idle" before there is a kernel, and cells sent then are dropped without a word.
        """
        for session in self.sessions():
            kernel = session["kernel"]
            if session["path"] == NOTEBOOK and kernel["execution_state"] == "idle" and kernel["connections"] >= 1:
                return str(kernel["id"])
        return None

    def saved_cells(self) -> list[dict[str, Any]]:
        """The code cells of the notebook as last saved; none while it is being written."""
        try:
            notebook = json.loads((self.folder / NOTEBOOK).read_text(encoding="utf-8"))
        except ValueError:
            return []
        return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]

    def ask_kernel(self, kernel: str, expression: str) -> Any:
        """The value of an expression in the notebook's kernel, by a connection of the test's own; JSON only."""
        client = BlockingKernelClient()
        client.load_connection_file(str(self.folder / "runtime" / f"kernel-{kernel}.json"))
        client.start_channels()
        try:
            client.wait_for_ready(timeout=WAIT_S)
            code = {"value": f"__import__('json').dumps({expression})"}
            reply = client.execute_interactive(
                "", user_expressions=code, silent=True, timeout=WAIT_S, output_hook=lambda message: None
            )
            value = reply["content"]["user_expressions"]["value"]
            assert value["status"] == "ok", value
            return json.loads(eval_text(value["data"]["text/plain"]))
        finally:
            client.stop_channels()

    def _announced(self) -> tuple[str, str, str] | None:
        if self.process.poll() is not None:
            raise AssertionError(f"JupyterLab ended with {self.process.returncode}:\n{''.join(self.lines)}")
        found = ADDRESS.search("".join(self.lines))
        return (found[1], found[2], found[3]) if found else None

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def end(self) -> None:
        """End the server as a closed terminal or Ctrl-C would, and see that nothing outlives it."""
        processes = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        self.process.terminate()
        try:
            self.process.wait(ENDS_TIMEOUT_S)
            _, left = psutil.wait_procs(processes, timeout=ENDS_TIMEOUT_S)
            assert not left, f"processes outlived JupyterLab: {left}"
        finally:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._reader.join(ENDS_TIMEOUT_S)
            self.process.wait(ENDS_TIMEOUT_S)
            if self.process.stdout is not None:
                self.process.stdout.close()


@contextlib.contextmanager
def running_lab(repository: pathlib.Path, folder: pathlib.Path) -> Iterator[Lab]:
    """Start `labkit lab` on a copy of the package and its notebooks, with settings of nobody."""
    for name in ("labkit", "notebooks"):
        shutil.copytree(repository / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_*"))
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "NO_BROWSER": "1",
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "labkit", "lab"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lab = None
    try:
        lab = Lab(folder, process)
        yield lab
    finally:
        if lab is not None:
            lab.end()
        else:
            process.kill()
            process.wait(ENDS_TIMEOUT_S)


def wait_for(look: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Look again and again until there is something to see; returns it."""
    deadline = time.monotonic() + timeout_s
    while True:
        if found := look():
            return found
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain for {what}"
        time.sleep(0.2)


def eval_text(quoted: str) -> str:
    """The text whose `repr` this is."""
    import ast

    return str(ast.literal_eval(quoted))
