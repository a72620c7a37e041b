"""Measured collectives beside alpha and beta: NCCL within a host, and across hosts."""

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.published_row import TABLES as OWN_TABLES
from benchmarks.published_row import Row, error_pct, positive, read, tried
from labkit.predict import Reach, collective_time
from labkit.spec import Hardware

DGX1_RINGS = {2: 1, 3: 2, 4: 4, 5: 2, 6: 2, 7: 4, 8: 6}
"""Rings of 25 GB/s that NCCL finds among so many V100 of a DGX-1, whose links are a cube mesh with some doubled."""

PROFILER_START_S = 25e-6
"""What a call takes beyond its work in vTrain's look-up tables."""

EFA_HOP_S = 65e-6
"""What a hop over EFA takes beyond one over InfiniBand, on each way of a collective."""

Cell = tuple[str, float, float, float]
"""Machine, bytes, seconds measured, seconds predicted."""


def within_host(row: dict[str, str], share: float) -> float:
    """Seconds of a row of vTrain's tables, where collectives reach this share of the links."""
    ranks = int(row["ranks"])
    hardware = Hardware.preset("a100-80")
    if row["gpu"] == "V100":
        hardware = replace(hardware, link_bytes_per_s=25e9 * DGX1_RINGS[ranks])
    hardware = replace(hardware, network_efficiency=share)
    return PROFILER_START_S + collective_time(row["collective"], float(row["size_bytes"]), Reach(ranks, 1), hardware)


def _vtrain(tables_dir: Path) -> list[Cell]:
    cells = [tried(_vtrain_cell, row) for row in read(tables_dir, "collectives_vtrain_intranode")]
    return [cell for cell in cells if cell is not None]


def _vtrain_cell(row: dict[str, str]) -> Cell:
    machine_name, seconds = f"{row['gpu']} {row['ranks']}", within_host(row, _shares()[row["gpu"]])
    return machine_name, float(row["size_bytes"]), positive(row["time_us"]) / 1e6, seconds


@cache
def _shares() -> dict[str, float]:
    """Each device's share, fitted to the project's own table."""
    own = read(OWN_TABLES, "collectives_vtrain_intranode")
    return {gpu: _share([row for row in own if row["gpu"] == gpu]) for gpu in ("A100", "V100")}


def _share(rows: Sequence[dict[str, str]]) -> float:
    """The share of the links at which as many of a device's rows are predicted too long as too short."""
    low, high = 0.3, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        ratio = statistics.median(within_host(row, middle) / float(row["time_us"]) * 1e6 for row in rows)
        low, high = (middle, high) if ratio > 1 else (low, middle)
    return (low + high) / 2


def machine(text: str) -> Hardware | None:
    """The device and network that a machine's description names."""
    found = re.search(r"GB200|B200|H200|H100|A100|p4d|p5en|p5", text)
    if found is None:
        return None
    name = {"p4d": "a100-80", "p5": "h100", "p5en": "h200", "A100": "a100-80"}.get(found[0], found[0].lower())
    hardware = Hardware.preset(name)
    ports = re.search(r"(?:(\d+)x)?(\d+) ?Gb?(?:/s)?\b", text.split("(")[-1] if "EFA" in text else text)
    if ports and "GPU" not in ports[0]:
        per_host = int(ports[1] or 1) * int(ports[2]) / 8 * 1e9
        hardware = replace(hardware, network_bytes_per_s=per_host / 8)
    return hardware


def across_hosts(row: dict[str, str], hardware: Hardware) -> float:
    """Seconds of a row of nccl-tests: the data sheet's links, nothing fitted but EFA's latency."""
    ranks, hosts = int(row["ranks"]), int(row["nodes"])
    ways = 2 if row["collective"] == "all_reduce" else 1
    start_s = ways * EFA_HOP_S * (hosts - 1).bit_length() if "EFA" in row["machine"] else 0.0
    return start_s + collective_time(row["collective"], float(row["size_bytes"]), Reach(ranks, hosts), hardware)


def _nccl(tables_dir: Path) -> list[Cell]:
    cells = [tried(_nccl_cell, row) for row in read(tables_dir, "collectives_nccl")]
    return [cell for cell in cells if cell is not None]


def _nccl_cell(row: dict[str, str]) -> Cell | None:
    hardware = machine(row["machine"])
    if hardware is None:
        return None
    return row["machine"], float(row["size_bytes"]), positive(row["time_us"]) / 1e6, across_hosts(row, hardware)


def alpha_beta(cells: Sequence[Cell]) -> list[float]:
    """The baseline: alpha + bytes x beta for each machine, least squares of relative errors."""
    found = [0.0] * len(cells)
    for name in {cell[0] for cell in cells}:
        places = [place for place, cell in enumerate(cells) if cell[0] == name]
        ones = [1 / cells[place][2] for place in places]
        sizes = [cells[place][1] / cells[place][2] for place in places]
        pairs = ((ones, ones), (ones, sizes), (sizes, sizes))
        aa, ab, bb = (sum(x * y for x, y in zip(one, two, strict=True)) for one, two in pairs)
        a, b = sum(ones), sum(sizes)
        determinant = aa * bb - ab * ab
        alpha, beta = (
            ((a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant) if determinant else (1 / ones[0], 0.0)
        )
        for place in places:
            found[place] = alpha + beta * cells[place][1]
    return found


TABLES: dict[str, Callable[[Path], list[Cell]]] = {
    "collectives_vtrain_intranode": _vtrain,
    "collectives_nccl": _nccl,
}


def score(tables_dir: Path) -> list[Row]:
    """Mean and median error of each table, beside a line fitted to each machine."""
    found = []
    for table, make in TABLES.items():
        cells = make(tables_dir)
        if not cells:
            continue
        measured, predicted, line = [cell[2] for cell in cells], [cell[3] for cell in cells], alpha_beta(cells)
        found.append(Row(table, "time_us", error_pct(predicted, measured), error_pct(line, measured), len(cells)))
        medians = [
            100 * statistics.median(abs(guess / true - 1) for guess, true in zip(each, measured, strict=True))
            for each in (predicted, line)
        ]
        found.append(Row(table, "time_us, median error", *medians, len(cells)))
    return found
