"""JupyterLab as `labkit lab` starts it: on loopback, with a token of its own, at the first notebook."""

import json
import os
import pathlib
import runpy
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import types
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager

from labkit.errors import LabError

__all__ = ["choose_port", "quiet_settings", "serve", "server_options"]

HOST = "127.0.0.1"
FIRST_PORT = 8888
TRIED_PORTS = 50
READY_TIMEOUT_S = 120.0
FIRST_NOTEBOOK = pathlib.Path("notebooks") / "00_start.ipynb"


def choose_port(wanted: int | None, first: int = FIRST_PORT) -> int:
    """The port to serve on: the wanted one, or the first free one from `first` on.

    Raises:
        LabError: the wanted port is impossible or taken, or none of the tried ones is free.
    """
    if wanted is None:
        for port in range(first, first + TRIED_PORTS):
            if _is_free(port):
                return port
        raise LabError(f"Ports {first} to {first + TRIED_PORTS - 1} are all in use: choose a free one with PORT=.")
    if not 1 <= wanted <= 65535:
        raise LabError(f"PORT={wanted} is no port: they go from 1 to 65535. PORT={first} is the usual one.")
    if not _is_free(wanted):
        raise LabError(f"Port {wanted} is in use or not allowed: choose another, or leave PORT out to get a free one.")
    return wanted


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def home() -> pathlib.Path:
    """The folder that JupyterLab shows: the repository, or here where labkit was installed without one."""
    repository = pathlib.Path(__file__).resolve().parent.parent
    return repository if (repository / "notebooks").is_dir() else pathlib.Path.cwd()


def server_options(*, port: int, folder: pathlib.Path, page: str, as_root: bool) -> list[str]:
    """The command line of `jupyter lab`."""
    options = [
        f"--ServerApp.ip={HOST}",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={folder}",
        f"--LabApp.default_url={page}",
        "--ServerApp.open_browser=False",
        "--ServerApp.answer_yes=True",  # one Ctrl-C ends it, without a question
        "--Application.log_level=ERROR",  # of the server and of every extension
    ]
    return [*options, "--allow-root"] if as_root else options


def quiet_settings(prefix: pathlib.Path) -> None:
    """Switch off JupyterLab's question about news, which covers the first notebook; keep other overrides."""
    path = prefix / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
    try:
        overrides = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        overrides = {}
    notification = {"fetchNews": "false", "checkForUpdates": False}
    if overrides.get("@jupyterlab/apputils-extension:notification") == notification:
        return
    overrides["@jupyterlab/apputils-extension:notification"] = notification
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(overrides, indent=2) + "\n", encoding="utf-8")
    except OSError:
        return  # a prefix of somebody else's: the question shows, nothing breaks


@contextmanager
def _token_file() -> Iterator[tuple[str, str]]:
    """A fresh token and a file (mode 0600) that holds it: on no command line, in no kernel's environment."""
    token = secrets.token_hex(24)
    descriptor, path = tempfile.mkstemp(prefix="labkit-token-")  # mkstemp makes it 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
        yield token, path
    finally:
        pathlib.Path(path).unlink(missing_ok=True)


def serve(*, port: int | None = None, browser: bool = True) -> None:
    """Run JupyterLab in this process until Ctrl-C or SIGTERM; print its address once it answers.

    Args:
        port: the port on loopback; None takes a free one from 8888 on.
        browser: open the page in a browser, where there is a screen.

    Raises:
        LabError: there is no port to serve on.
    """
    chosen = choose_port(port)
    folder = home()
    page = f"/lab/tree/{FIRST_NOTEBOOK.as_posix()}" if (folder / FIRST_NOTEBOOK).exists() else "/lab"
    quiet_settings(pathlib.Path(sys.prefix))
    _end_on_signals()
    with _token_file() as (token, path):
        os.environ["JUPYTER_TOKEN_FILE"] = path
        announcer = threading.Thread(target=_announce, args=(chosen, page, token, browser), daemon=True)
        announcer.start()
        sys.argv = ["jupyter-lab", *server_options(port=chosen, folder=folder, page=page, as_root=os.geteuid() == 0)]
        runpy.run_module("jupyterlab", run_name="__main__")


def _end_on_signals() -> None:
    """Ctrl-C and a closed terminal end kernels and ranks as SIGTERM does, also where a shell had them ignored.

    Jupyter takes SIGTERM over once it is up, and Ctrl-C where there is a terminal.
    """

    def leave(number: int, frame: types.FrameType | None) -> None:
        raise SystemExit(128 + number)

    def as_sigterm(number: int, frame: types.FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, as_sigterm)
    signal.signal(signal.SIGHUP, as_sigterm)


def _announce(port: int, page: str, token: str, browser: bool) -> None:
    """Wait until the server answers, then print the address and open it."""
    print("labkit: starting JupyterLab ...", flush=True)
    if not _answers(port, token, READY_TIMEOUT_S):
        print(f"labkit: JupyterLab did not answer on port {port} in {READY_TIMEOUT_S:.0f} s.", file=sys.stderr)
        return
    address = f"http://{HOST}:{port}{page}?token={token}"
    print(f"labkit: JupyterLab is ready; Ctrl-C ends it.\n\n    {address}\n", flush=True)
    has_screen = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if browser and has_screen:
        webbrowser.open(address)


def _answers(port: int, token: str, timeout_s: float) -> bool:
    """Whether our own server (it knows the token) answers in time."""
    request = urllib.request.Request(f"http://{HOST}:{port}/api/status", headers={"Authorization": f"token {token}"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            with direct.open(request, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    return False
