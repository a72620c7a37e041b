"""What tests of grading share: a sandbox that works here, and a look at what they leave behind."""

import time
from collections.abc import Iterator

import psutil
import pytest

from labkit.grade import sandbox
from labkit.grade.sandbox import Sandbox

GONE_TIMEOUT_S = 60.0


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail a test after which there are processes that were not there before."""
    before = set(psutil.pids())
    yield
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while left := [one for one in psutil.Process().children(recursive=True) if one.pid not in before]:
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {left}")
        time.sleep(0.05)


@pytest.fixture(scope="session")
def chosen() -> Sandbox:
    """The sandbox of this machine."""
    return sandbox.choose()
