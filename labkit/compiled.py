"""DeepSpeed's compiled operations: where an environment keeps them, and whether they fit it. Standard library only."""

import json
import pathlib
import platform
import struct
import sys

__all__ = ["OPERATIONS", "STAMP", "folder", "is_current", "library", "made_from", "why_not"]

OPERATIONS = {"cpu_adam": "CPUAdamBuilder", "deepspeed_shm_comm": "ShareMemCommBuilder"}
"""Operations by DeepSpeed's name for them, and the class that builds each."""

STAMP = "labkit-stamp.json"
_VECTORS = ("avx2", "avx512f", "avx512bw", "avx512vl", "sve")
_PACKAGES = ("deepspeed", "torch")


def folder(prefix: pathlib.Path | None = None) -> pathlib.Path:
    """Where the operations of an environment lie; what TORCH_EXTENSIONS_DIR is set to.

    Args:
        prefix: the environment; None = this process's.
    """
    return (prefix or pathlib.Path(sys.prefix)) / "torch_extensions"


def library(name: str, prefix: pathlib.Path | None = None) -> pathlib.Path:
    """The shared library of an operation in an environment (None = this process's), built or not."""
    return folder(prefix) / name / f"{name}.so"


def made_from(prefix: pathlib.Path) -> dict[str, str]:
    """What a build depends on: versions of the packages in the environment, and what the processor can do."""
    site_packages = next(iter(sorted(prefix.glob("lib/python3.*/site-packages"))), prefix)
    versions = {
        name: next((info.name for info in sorted(site_packages.glob(f"{name}-*.dist-info"))), "") for name in _PACKAGES
    }
    return {**versions, "python": site_packages.parent.name, "processor": _processor()}


def is_current(prefix: pathlib.Path) -> bool:
    """Whether all operations are there, whole, and were built from what the environment holds now."""
    return _is_stamped(prefix) and all(_is_whole(library(name, prefix)) for name in OPERATIONS)


def why_not(name: str) -> str:
    """Why an operation cannot be used in this process's environment; "" where it can."""
    if not library(name).exists():
        return f"it is not in {folder()}"
    if not _is_whole(library(name)):
        return f"{library(name)} is cut short"
    if not _is_stamped(pathlib.Path(sys.prefix)):
        return f"that in {folder()} was built for other versions or another processor"
    return ""


def _is_stamped(prefix: pathlib.Path) -> bool:
    try:
        stamp = json.loads((folder(prefix) / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(stamp == made_from(prefix))


def _is_whole(path: pathlib.Path) -> bool:
    """Whether a shared library has its end: who loads one that was cut off may be killed by SIGBUS.

    The table of sections, to which the header of an ELF file points, is written last.
    """
    try:
        with path.open("rb") as file:
            header, size = file.read(64), path.stat().st_size
    except OSError:
        return False
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return False
    (start,) = struct.unpack_from("<Q", header, 0x28)
    entry_bytes, num_entries = struct.unpack_from("<HH", header, 0x3A)
    return bool(start + entry_bytes * num_entries <= size)


def _processor() -> str:
    """The architecture, and which of the vector instructions that the operations use it has."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        text = ""
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "").split()
    return " ".join([platform.machine(), *(name for name in _VECTORS if name in flags)])
