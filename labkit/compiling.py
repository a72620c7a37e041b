"""Compile DeepSpeed's operations into this environment, once, beside each other, with a line of progress.

DeepSpeed would compile each at its first use, for a minute and in every process that meets it, and after a killed build
wait for its lock for ever.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator

import psutil

from labkit import compiled
from labkit.errors import LabError

__all__ = ["compile_operations", "end_children", "missing_tools"]

TIMEOUT_S = 1800.0
_PERIOD_S, _LOG_PERIOD_S = 0.2, 15.0
_LOG = "labkit-compile.log"

# Ends with its parent, together with the compiler that it started.
_BUILD = """
import os, sys, threading, time
from labkit.compiling import end_children

def watch(parent):
    while os.getppid() == parent:
        time.sleep(1)
    end_children(os.getpid())
    os._exit(1)

threading.Thread(target=watch, args=(int(sys.argv[2]),), daemon=True).start()
import deepspeed.ops.op_builder.cpu as builders
getattr(builders, sys.argv[1])().load()
"""


def missing_tools() -> list[str]:
    """What compiling needs and this machine lacks."""
    tools = {
        "a C++ compiler (g++)": any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++"))),
        "ninja": shutil.which("ninja", path=_path()),
        "Python.h (python-dev)": (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists(),
    }
    return [name for name, there in tools.items() if not there]


def end_children(pid: int) -> None:
    """Kill every descendant of a process, parents first: ninja puts each compiler into a process group of its own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def compile_operations(*, timeout_s: float = TIMEOUT_S) -> bool:
    """Compile what is not compiled yet for this environment.

    Returns:
        Whether anything had to be compiled.

    Raises:
        LabError: not on this system, a tool is missing, or the compiler failed.
    """
    if compiled.is_current(pathlib.Path(sys.prefix)):
        return False
    if sys.platform != "linux":
        raise LabError("DeepSpeed's operations are not compiled on this system: layouts of torch run without them.")
    if missing := missing_tools():
        raise LabError(
            f"DeepSpeed's operations are not compiled, for lack of {', '.join(missing)}: offloaded AdamW needs them, "
            "everything else runs. Install what is missing, then `labkit compile`."
        )
    folder = compiled.folder()
    folder.mkdir(mode=0o755, exist_ok=True)
    with (folder / "labkit.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if compiled.is_current(pathlib.Path(sys.prefix)):
            return False
        _compile(folder, timeout_s)
        draft = folder / f"{compiled.STAMP}.draft"
        draft.write_text(json.dumps(compiled.made_from(pathlib.Path(sys.prefix))), encoding="utf-8")
        draft.replace(folder / compiled.STAMP)
    return True


def _compile(folder: pathlib.Path, timeout_s: float) -> None:
    for name in compiled.OPERATIONS:  # what a killed or older build left, its lock above all
        shutil.rmtree(folder / name, ignore_errors=True)
    started_s = time.monotonic()
    next_s = started_s
    with (folder / _LOG).open("wb") as log, _builds(log.fileno()) as builds:
        while running := [name for name, build in builds.items() if build.poll() is None]:
            now_s = time.monotonic()
            if now_s - started_s > timeout_s:
                raise LabError(f"{' and '.join(running)} did not compile within {timeout_s:g} s. See {folder / _LOG}.")
            if now_s >= next_s:
                _show(running, now_s - started_s)
                next_s = now_s + (_PERIOD_S if sys.stdout.isatty() else _LOG_PERIOD_S)
            time.sleep(0.05)
        failed = [name for name, build in builds.items() if build.returncode or not compiled.library(name).exists()]
    if sys.stdout.isatty():
        print("\r\x1b[K", end="", flush=True)
    if failed:
        raise LabError(f"DeepSpeed's {' and '.join(failed)} did not compile: {_why(folder / _LOG)}")


@contextlib.contextmanager
def _builds(log: int) -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    """A process for each operation; all of them are gone afterwards."""
    environment = {
        **os.environ,
        "PATH": _path(),
        "TORCH_EXTENSIONS_DIR": str(compiled.folder()),
        "DS_ACCELERATOR": "cpu",
    }
    builds: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, builder in compiled.OPERATIONS.items():
            builds[name] = subprocess.Popen(
                [sys.executable, "-c", _BUILD, builder, str(os.getpid())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        yield builds
    finally:
        for build in builds.values():
            if build.poll() is None:
                end_children(build.pid)
                build.kill()
            build.wait()


def _show(running: list[str], elapsed_s: float) -> None:
    clock = f"{int(elapsed_s) // 60}:{int(elapsed_s) % 60:02d}"
    text = f"  {clock:>5}  compiling for DeepSpeed (once, some minutes): {', '.join(running)}"
    print(f"\r\x1b[K{text}" if sys.stdout.isatty() else text, end="" if sys.stdout.isatty() else "\n", flush=True)


def _path() -> str:
    """The path of a shell that activated this environment: ninja may be there alone."""
    return os.pathsep.join([str(pathlib.Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)])


def _why(log: pathlib.Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [line.strip() for line in lines if "error" in line.lower()]
    return f"{(errors or lines or ['it said nothing'])[0][:200]} (all that was said: {log})"
