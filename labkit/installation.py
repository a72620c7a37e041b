"""Make `.venv`, keep it up to date, run a command in it. Standard library only: runs before anything is installed."""

import fcntl
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import types
from dataclasses import dataclass
from typing import NoReturn

from labkit import compiled, pip_install

OLDEST = (3, 11)
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
VENV = REPOSITORY / ".venv"
BUILD_TOOLS = ("pip", "setuptools", "wheel", "ninja", "numpy")  # what deepspeed's own build looks for, besides torch
GB = 10**9
ACTIONS = ("lab", "test", "check", "bench", "setup")


def refuse(message: str) -> NoReturn:
    """End with one line on stderr and exit code 1."""
    sys.exit(f"labkit: {message}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What an install costs, in bytes, roughly and from above."""

    download_bytes: int
    disk_bytes: int
    what: str


def need(*, torch_index: str, platform: str, has_torch: bool) -> Need:
    """What is still to be downloaded and how much disk it takes.

    Args:
        torch_index: address of PyTorch's wheels, or "" for the default index.
        platform: `sys.platform`.
        has_torch: whether torch is already in `.venv`.
    """
    if has_torch:
        return Need(download_bytes=GB // 2, disk_bytes=GB, what="torch is here already; the rest is small")
    if torch_index or platform != "linux":
        return Need(download_bytes=6 * GB // 10, disk_bytes=5 * GB // 2, what="PyTorch's small build")
    return Need(
        download_bytes=7 * GB // 2, disk_bytes=9 * GB, what="PyTorch's default Linux build brings the CUDA libraries"
    )


def fingerprint(pyproject: bytes, constraints: bytes, python: str, extras: str) -> str:
    """What `.venv` must have been made from to be up to date."""
    parts = (pyproject, constraints, python.encode(), extras.encode())
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def venv_python_version(venv: pathlib.Path) -> str:
    """The version that `.venv` was made with, or "" where it is missing or broken."""
    config = venv / "pyvenv.cfg"
    if not (venv / "bin" / "python").exists() or not config.exists():  # exists() follows the link to the interpreter
        return ""
    for line in config.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition("=")
        if key.strip() in {"version", "version_info"}:
            return ".".join(value.strip().split(".")[:3])
    return ""


def site_packages(venv: pathlib.Path) -> pathlib.Path:
    """Where `.venv` keeps its packages."""
    return next(iter(sorted(venv.glob("lib/python3.*/site-packages"))), venv / "lib")


def stamp_text(extras: str) -> str:
    """What the stamp of an up-to-date `.venv` says."""
    pyproject = (REPOSITORY / "pyproject.toml").read_bytes()
    constraints = (REPOSITORY / "constraints.txt").read_bytes()
    return fingerprint(pyproject, constraints, venv_python_version(VENV), extras)


def up_to_date(extras: str, torch_index: str) -> bool:
    """Whether `.venv` holds what pyproject.toml and constraints.txt ask for."""
    try:
        stamp = json.loads((VENV / "labkit-stamp.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(stamp, dict):
        return False
    torch_fits = torch_index in {"", stamp.get("torch_index")}
    return bool(venv_python_version(VENV)) and torch_fits and stamp.get("made_from") == stamp_text(extras)


def check_machine(cost: Need) -> None:
    """Refuse, in one line, what would fail later with a traceback."""
    if os.name != "posix":
        refuse("labkit needs Linux or macOS: on Windows, run it inside WSL.")
    for module in ("venv", "ensurepip", "ssl"):
        if importlib.util.find_spec(module) is None:
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            refuse(f"this Python has no {module} module: on Debian and Ubuntu, apt-get install python{version}-venv.")
    if not os.access(REPOSITORY, os.W_OK):
        refuse(f"{REPOSITORY} cannot be written: clone labkit into a folder of your own.")
    free_bytes = shutil.disk_usage(REPOSITORY).free
    if free_bytes < cost.disk_bytes:
        short = (cost.disk_bytes - free_bytes) / GB
        refuse(
            f"{free_bytes / GB:.1f} GB of disk is free in {REPOSITORY} and {cost.disk_bytes / GB:.1f} GB is needed "
            f"({cost.what}): free {short:.1f} GB more, or take PyTorch's CPU wheels (TORCH_INDEX=, see README.md)."
        )


def announce(cost: Need, torch_index: str) -> None:
    """Say what is about to be downloaded, before it is."""
    free_gb = shutil.disk_usage(REPOSITORY).free / GB
    print(f"labkit sets itself up in {VENV} (once; interrupted, it goes on from there).")
    print(f"  download: up to {cost.download_bytes / GB:.1f} GB ({cost.what})")
    print(f"  disk:     up to {cost.disk_bytes / GB:.1f} GB; {free_gb:.0f} GB is free")
    if not torch_index and cost.disk_bytes > 5 * GB:
        print(
            "  smaller:  without a GPU, `TORCH_INDEX=<address of PyTorch's CPU wheels> make lab` takes 2.5 GB of disk"
        )
    sys.stdout.flush()


def make_venv() -> None:
    """Make `.venv`, or make it anew where it is broken or too old."""
    version = venv_python_version(VENV)
    fits = bool(version) and tuple(int(part) for part in version.split(".")[:2]) >= OLDEST
    if fits and subprocess.call([VENV / "bin" / "python", "-c", "import pip"], stderr=subprocess.DEVNULL) == 0:
        return
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True)
    if made.returncode != 0:
        lines = (made.stderr + made.stdout).strip().splitlines() or ["it said nothing"]
        refuse(f"python -m venv failed: {lines[-1]}")


def install(extras: str, torch_index: str) -> None:
    """Bring `.venv` up to date, torch before deepspeed, whose build looks at it."""
    make_venv()
    packages = site_packages(VENV)
    for name in pip_install.repair(packages):
        print(f"  {name} was half installed; it is installed again")
    pins = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line]
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    constraints = ["-c", str(REPOSITORY / "constraints.txt")]
    bar = ["--progress-bar", "raw"]
    steps = [[*BUILD_TOOLS, *constraints]]  # first: an older pip has no raw progress
    if torch_index:
        steps.append(["--no-deps", torch, "--index-url", torch_index, *bar])
    steps.append([torch, *constraints, *bar])
    steps.append(["--no-build-isolation", "-e", f"{REPOSITORY}[{extras}]", *constraints, *bar])
    started_s = time.monotonic()
    for arguments in steps:
        pip_install.run(
            VENV / "bin" / "python",
            arguments,
            log=VENV / "labkit-install.log",
            expected=len(pins),
            started_s=started_s,
            count_installed=lambda: sum(1 for _ in packages.glob("*.dist-info")),
        )
    stamp = {"made_from": stamp_text(extras), "torch_index": torch_index}
    draft = VENV / "labkit-stamp.draft"
    draft.write_text(json.dumps(stamp), encoding="utf-8")
    draft.replace(VENV / "labkit-stamp.json")
    print(f"  done in {time.monotonic() - started_s:.0f} s", flush=True)


def set_up(extras: str, torch_index: str) -> None:
    """Install where that is needed, one process at a time."""
    if up_to_date(extras, torch_index):
        return
    has_torch = any(site_packages(VENV).glob("torch-*.dist-info/RECORD"))
    cost = need(torch_index=torch_index, platform=sys.platform, has_torch=has_torch)
    check_machine(cost)
    lock_path = REPOSITORY / "build" / "bootstrap.lock"
    lock_path.parent.mkdir(exist_ok=True)
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("labkit: another set-up is at work in this folder; waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not up_to_date(extras, torch_index):
            announce(cost, torch_index)
            (VENV / "labkit-stamp.json").unlink(missing_ok=True)
            install(extras, torch_index)


def compile_operations() -> None:
    """Have DeepSpeed's operations compiled into `.venv`; where that cannot be, one line says so, and set-up goes on."""
    if sys.platform == "linux" and not compiled.is_current(VENV):
        python = str(VENV / "bin" / "python")
        subprocess.run([python, "-m", "labkit", "compile"], env=environment(), cwd=REPOSITORY, check=False)


def side_by_side() -> list[str]:
    """The suite in two processes, each with ranks of its own, where there are two cores; a later -n overrules it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return ["-n", "2"] if cores > 1 else ["-n", "0"]


def commands(action: str, arguments: list[str]) -> list[list[str]]:
    """The command lines of an action, inside `.venv`."""
    python = str(VENV / "bin" / "python")
    if action == "lab":
        return [[python, "-m", "labkit", "lab", *arguments]]
    if action == "test":
        return [[python, "-m", "pytest", *side_by_side(), *arguments]]
    if action == "bench":
        return [[python, "-m", "benchmarks", *arguments]]
    if action == "check":
        tools = (("ruff", "format", "--check", "."), ("ruff", "check", "."), ("mypy",), ("lint-imports",))
        return [[str(VENV / "bin" / tool[0]), *tool[1:]] for tool in tools]
    return []


def environment() -> dict[str, str]:
    """The environment of a shell that activated `.venv`."""
    path = os.pathsep.join([str(VENV / "bin"), os.environ.get("PATH", os.defpath)])
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONHOME"}
    operations = os.environ.get("TORCH_EXTENSIONS_DIR", str(compiled.folder(VENV)))
    return {**kept, "VIRTUAL_ENV": str(VENV), "PATH": path, "TORCH_EXTENSIONS_DIR": operations}


def run_all(command_lines: list[list[str]]) -> int:
    """Run every command even where an earlier one failed; say at the end which did."""
    failed = []
    for command in command_lines:
        name = " ".join([pathlib.Path(command[0]).name, *command[1:]])
        print(f"$ {name}", flush=True)
        if subprocess.call(command, env=environment(), cwd=REPOSITORY) != 0:
            failed.append(name)
    if failed:
        print(f"labkit: failed: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def end(signal_number: int, frame: types.FrameType | None) -> None:
    """Leave through the `finally` blocks when asked to end."""
    raise SystemExit(128 + signal_number)


def main(arguments: list[str]) -> int:
    """Set up, then run the action named first."""
    if not arguments or arguments[0] not in ACTIONS:
        refuse(f"say what to do: {', '.join(ACTIONS)} (`make lab` and `make test` are the usual ways in).")
    os.chdir(REPOSITORY)
    signal.signal(signal.SIGTERM, end)
    wanted = ",".join(sorted({"dev", *filter(None, os.environ.get("EXTRAS", "").split(","))}))
    known = set(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    if unknown := set(wanted.split(",")) - known:
        refuse(f"EXTRAS={','.join(sorted(unknown))} is unknown: there are {', '.join(sorted(known))}.")
    try:
        set_up(wanted, os.environ.get("TORCH_INDEX", ""))
        compile_operations()
    except pip_install.InstallError as error:
        refuse(str(error))
    except KeyboardInterrupt:
        print("\nlabkit: stopped; the same command goes on from here.", file=sys.stderr)
        return 130
    command_lines = commands(arguments[0], arguments[1:])
    if len(command_lines) == 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.execve(command_lines[0][0], command_lines[0], environment())
    return run_all(command_lines)
