"""Leaks are failures: what a test of ranks leaves behind is named."""

import time
from collections.abc import Iterator

import psutil
import pytest

from tests import shared_memory
from tests.conftest import SharedRanks

LEAK_TIMEOUT_S = 30.0


@pytest.fixture(autouse=True)
def no_leaks(shared_ranks: SharedRanks) -> Iterator[None]:
    """Fail a test that leaves a process or a `/dev/shm` file."""
    before = _processes(), shared_memory.files()
    yield
    deadline = time.monotonic() + LEAK_TIMEOUT_S
    while left := (_processes() - before[0] - shared_ranks.processes(), shared_memory.left_since(before[1])):
        if not any(left):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: processes {sorted(left[0])}, /dev/shm files {sorted(left[1])}")
        time.sleep(0.05)


def _processes() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True)}
