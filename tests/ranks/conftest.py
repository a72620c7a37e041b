"""Leaks are failures: what a test of ranks leaves behind is named."""

import os
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.conftest import SharedRanks

LEAK_TIMEOUT_S = 30.0


@pytest.fixture(autouse=True)
def no_leaks(shared_ranks: SharedRanks) -> Iterator[None]:
    """Fail a test that leaves a process or a `/dev/shm` file."""
    before = _processes(), set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + LEAK_TIMEOUT_S
    while left := (_processes() - before[0] - shared_ranks.processes(), set(os.listdir("/dev/shm")) - before[1]):
        if not any(left):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: processes {sorted(left[0])}, /dev/shm files {sorted(left[1])}")
        time.sleep(0.05)


def _processes() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True)}
