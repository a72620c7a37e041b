"""Which backend and devices ranks get; decided without importing torch and without touching CUDA."""

import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import ClusterError

QUERY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What each rank runs on.

    Attributes:
        backend: "nccl" or "gloo".
        reason: why.
        visible: `CUDA_VISIBLE_DEVICES` of each rank, "" on the CPU.
    """

    backend: str
    reason: str
    visible: tuple[str, ...]


def choose(num_ranks: int, backend: str | None) -> Devices:
    """One GPU per rank over NCCL where there are enough, else the CPU over gloo.

    Raises:
        ClusterError: NCCL was asked for and there are fewer GPUs than ranks.
    """
    gpus, cuda = _gpus(), _torch_cuda()
    if backend != "gloo" and cuda and len(gpus) >= num_ranks:
        reason = f"{len(gpus)} GPUs for {num_ranks} ranks"
        return Devices(backend="nccl", reason=reason, visible=tuple(gpus[:num_ranks]))
    if not cuda:
        lack = f"torch is built without CUDA ({len(gpus)} GPUs seen)"
    else:
        lack = f"{len(gpus)} GPUs for {num_ranks} ranks: NCCL takes one GPU a rank"
    if backend == "nccl":
        fix = f"Start at most {len(gpus)} ranks, or use backend='gloo'." if cuda and gpus else "Use backend='gloo'."
        raise ClusterError(f"backend='nccl' cannot be had: {lack}. {fix}")
    reason = "asked for" if backend == "gloo" else lack
    return Devices(backend="gloo", reason=reason, visible=("",) * num_ranks)


def _gpus() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` would name them."""
    there = _listed()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(len(there))]
    # As CUDA reads it: what comes after an entry that names no GPU, or names one again, is not seen.
    gpus: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry in gpus or not _names_one(entry, there):
            break
        gpus.append(entry)
    return gpus


def _names_one(entry: str, there: list[str]) -> bool:
    if entry.isdecimal():
        return int(entry) < len(there)
    return entry.startswith(("GPU-", "MIG-")) and any(entry in line for line in there)


def _listed() -> list[str]:
    """One text per GPU of this machine: the driver's lines about it, with the identifiers of its MIG parts."""
    command = ["nvidia-smi", "-L"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        known = Path("/proc/driver/nvidia/gpus")  # a container without the driver's tools
        return [(one / "information").read_text() for one in sorted(known.iterdir())] if known.is_dir() else []
    return [f"GPU {part}" for part in re.split(r"^GPU ", listed, flags=re.MULTILINE)[1:]]


def _torch_cuda() -> str:
    """The CUDA version that torch was built for, "" for a CPU build; read from its sources, since importing is slow."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ClusterError("torch is not installed in this environment. Run `make lab`, or pip install -e .")
    text = (Path(found.origin).parent / "version.py").read_text()
    match = re.search(r"^cuda[^=\n]*=\s*'([^']+)'", text, re.MULTILINE)
    return match.group(1) if match else ""
