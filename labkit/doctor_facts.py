"""What is true of this machine, gathered without judging it (`doctor` judges); torch is asked in its own process."""

import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass

import psutil

from labkit import compiled

__all__ = ["Facts", "Gpu", "Torch", "gather", "parse_cpu_quota", "parse_driver_cuda", "parse_gpus"]

PACKAGES = (
    "torch",
    "deepspeed",
    "ipyparallel",
    "jupyterlab",
    "ipykernel",
    "ipywidgets",
    "anywidget",
    "plotly",
    "numpy",
    "cloudpickle",
    "psutil",
    "py-spy",
)
NUM_PROBED_PORTS = 16
TORCH_TIMEOUT_S = 180
NVIDIA_TIMEOUT_S = 30
_MIB = 1 << 20

_ASK_TORCH = """
import json, torch
import torch.distributed as dist
nccl = dist.is_available() and dist.is_nccl_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda_build": torch.version.cuda or "",
    "num_devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else "",
    "gloo": dist.is_available() and dist.is_gloo_available(),
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as the driver lists it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """What torch says of itself.

    Attributes:
        version: its version; "" when it cannot be imported.
        cuda_build: the CUDA version it was built for, "" for a CPU build.
        num_devices: how many GPUs it can use.
        nccl: NCCL's version, "" without it.
        gloo: whether gloo is there.
        error: why it cannot be imported.
    """

    version: str = ""
    cuda_build: str = ""
    num_devices: int = 0
    nccl: str = ""
    gloo: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The machine, as far as the lab cares. Sizes in bytes; texts are "" where a thing is missing.

    `operations` says why DeepSpeed's compiled operations cannot be used, "" where they can.
    """

    platform: str
    python: tuple[int, int, int]
    prefix: str
    packages: dict[str, str]
    launchers_registered: bool
    torch: Torch
    gpus: tuple[Gpu, ...]
    driver: str
    driver_cuda: str
    driver_error: str
    num_free_ports: int
    hostname: str
    hostname_resolves: bool
    disk_free_bytes: int
    tmp_free_bytes: int
    shm_bytes: int | None
    memory_bytes: int
    num_cores: int
    max_open_files: int
    compiler: str
    ninja: str
    python_headers: bool
    operations: str
    git: str
    bubblewrap: str


def gather() -> Facts:
    """Look at this machine; takes some seconds, mostly importing torch once."""
    gpus, driver, driver_cuda, driver_error = _nvidia()
    hostname = socket.gethostname()
    headers = pathlib.Path(sysconfig.get_path("include")) / "Python.h"
    shm = pathlib.Path("/dev/shm")
    return Facts(
        platform=sys.platform,
        python=sys.version_info[:3],
        prefix=sys.prefix,
        packages={name: _version(name) for name in PACKAGES},
        launchers_registered=_launchers_registered(),
        torch=_torch(),
        gpus=gpus,
        driver=driver,
        driver_cuda=driver_cuda,
        driver_error=driver_error,
        num_free_ports=sum(_loopback_port_opens() for _ in range(NUM_PROBED_PORTS)),
        hostname=hostname,
        hostname_resolves=_resolves(hostname),
        disk_free_bytes=shutil.disk_usage(pathlib.Path.cwd()).free,
        tmp_free_bytes=shutil.disk_usage(tempfile.gettempdir()).free,
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        memory_bytes=psutil.virtual_memory().available,
        num_cores=_num_cores(),
        max_open_files=_max_open_files(),
        compiler=next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), ""),
        ninja=_tool("ninja"),
        python_headers=headers.exists(),
        operations=next(filter(None, map(compiled.why_not, compiled.OPERATIONS)), ""),
        git=shutil.which("git") or "",
        bubblewrap=shutil.which("bwrap") or "",
    )


def parse_gpus(text: str) -> tuple[tuple[Gpu, ...], str]:
    """GPUs and driver version from `nvidia-smi --query-gpu=name,memory.total,driver_version` (csv, no units: MiB).

    >>> parse_gpus("NVIDIA H200, 143771, 580.65.06")
    ((Gpu(name='NVIDIA H200', memory_bytes=150754820096),), '580.65.06')
    """
    gpus, driver = [], ""
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3:
            memory = int(parts[1]) * _MIB if parts[1].isdigit() else 0
            gpus.append(Gpu(name=parts[0], memory_bytes=memory))
            driver = parts[2]
    return tuple(gpus), driver


def parse_driver_cuda(text: str) -> str:
    """The newest CUDA version that the driver runs, from the head of `nvidia-smi`; "" where it is not told."""
    match = re.search(r"CUDA (?:\w+ )?Version:\s*([0-9]+\.[0-9]+)", text)
    return match[1] if match else ""


def parse_cpu_quota(text: str) -> int | None:
    """Whole cores that a container may use, from its `cpu.max`; None without a limit.

    >>> parse_cpu_quota("200000 100000"), parse_cpu_quota("max 100000")
    (2, None)
    """
    parts = text.split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or int(parts[1]) == 0:
        return None
    return max(1, int(parts[0]) // int(parts[1]))


def _nvidia() -> tuple[tuple[Gpu, ...], str, str, str]:
    """GPUs, driver version, the driver's CUDA version, and what nvidia-smi complained of."""
    if not shutil.which("nvidia-smi"):
        return (), "", "", ""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_TIMEOUT_S)
        head = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=NVIDIA_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), "", "", f"nvidia-smi: {error}"
    if listed.returncode != 0:
        lines = (listed.stdout + listed.stderr).strip().splitlines() or [f"exit code {listed.returncode}"]
        return (), "", "", f"nvidia-smi: {lines[0]}"
    gpus, driver = parse_gpus(listed.stdout)
    return gpus, driver, parse_driver_cuda(head.stdout), ""


def _torch() -> Torch:
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=TORCH_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Torch(error=str(error))
    if asked.returncode != 0:
        lines = asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"]
        return Torch(error=lines[-1])
    return Torch(**json.loads(asked.stdout.strip().splitlines()[-1]))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _launchers_registered() -> bool:
    groups = ("ipyparallel.engine_launchers", "ipyparallel.controller_launchers")
    return all("labkit" in importlib.metadata.entry_points(group=group).names for group in groups)


def _loopback_port_opens() -> bool:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            return True
    except OSError:
        return False


def _resolves(hostname: str) -> bool:
    try:
        return bool(socket.getaddrinfo(hostname, None))
    except OSError:
        return False


def _num_cores() -> int:
    """Cores that this process may use: its affinity, and its container's quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota = parse_cpu_quota(pathlib.Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii"))
    except OSError:
        quota = None
    return min(usable, quota or usable)


def _max_open_files() -> int:
    files = psutil.Process().rlimit(psutil.RLIMIT_NOFILE)[0] if hasattr(psutil, "RLIMIT_NOFILE") else 1 << 20
    return files if files >= 0 else 1 << 20


def _tool(name: str) -> str:
    """A program of this environment, or else of the path."""
    beside = pathlib.Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else (shutil.which(name) or "")
