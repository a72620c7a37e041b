"""What every test gets: markers that skip, or fail under LABKIT_REQUIRE, where the machine lacks what they need."""

import functools
import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Iterator

import hypothesis
import psutil
import pytest

import labkit as lk
from labkit import compiled
from labkit.cluster import Ranks
from tests import side_by_side

# The same examples on every machine, however slow it is: a failure is one that anybody can repeat.
hypothesis.settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=40, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("repeatable")

# A shell that starts the suite in the background has it ignore Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


@functools.cache
def has_sandbox() -> bool:
    """Whether bubblewrap may make namespaces here: in some containers it is there and may not."""
    program = shutil.which("bwrap")
    tried = [program or "bwrap", "--ro-bind", "/", "/", "--unshare-pid", "--unshare-net", "--proc", "/proc", "true"]
    return program is not None and subprocess.run(tried, capture_output=True, timeout=60).returncode == 0


NEEDS = {
    "browser": (lambda: bool(shutil.which("chromium")), "no chromium here (apt-get install chromium)"),
    "sandbox": (has_sandbox, "no bubblewrap that works here (apt-get install bubblewrap)"),
    "nbgrader": (
        lambda: importlib.util.find_spec("nbgrader") is not None,
        "no nbgrader here (EXTRAS=nbgrader make test)",
    ),
    "operations": (
        lambda: not compiled.why_not("cpu_adam"),
        "DeepSpeed's operations are not compiled here (labkit compile)",
    ),
    "gpu": (lambda: pathlib.Path("/dev/nvidia0").exists(), "no NVIDIA GPU here"),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose need is not met; where LABKIT_REQUIRE names the need, that is a failure."""
    required = set(filter(None, os.environ.get("LABKIT_REQUIRE", "").split(",")))
    for name, (is_met, why) in NEEDS.items():
        if item.get_closest_marker(name) and not is_met():
            if name in required:
                pytest.fail(f"{why}, and LABKIT_REQUIRE={name} asks for it", pytrace=False)
            pytest.skip(why)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Where the suite runs in several processes: what each of them does for that."""
    side_by_side.register(config)


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    """The folder of the checkout."""
    return REPOSITORY


class SharedRanks:
    """Four ranks for the whole session; replaced when a test left them in a state that others should not meet."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None

    def healthy(self) -> Ranks:
        """The shared ranks, idle; fresh ones if there are none or the last test spoilt them."""
        if self._ranks is None:
            self._ranks = lk.cluster.start(4)
        return self._ranks

    def check(self) -> None:
        """After a test: whatever it left is its own failure, and nobody else's."""
        ranks = self._ranks
        if ranks is None:
            return
        try:
            bad = [f"rank {one.rank} {one.state}" for one in ranks.status() if one.state in ("lost", "paused")]
            if not bad:
                ranks.interrupt()
                return
        except lk.errors.LabError as error:
            bad = [str(error)]
        self.stop()
        pytest.fail(f"the test left the shared ranks in this state: {'; '.join(bad)}")

    def processes(self) -> set[int]:
        """Every process of the shared ranks."""
        if self._ranks is None or self._ranks.stopped:
            return set()
        keeper = psutil.Process(self._ranks._crew.keeping.pid)
        return {keeper.pid} | {one.pid for one in keeper.children(recursive=True)}

    def stop(self) -> None:
        """End them."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.stop()


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[SharedRanks]:
    """The holder of the session's ranks."""
    shared = SharedRanks()
    yield shared
    shared.stop()


@pytest.fixture
def ranks(shared_ranks: SharedRanks) -> Iterator[Ranks]:
    """Four live ranks, shared by all tests that leave them as they found them (idle, alive, not paused)."""
    yield shared_ranks.healthy()
    shared_ranks.check()


@pytest.fixture
def own_ranks() -> Iterator[Ranks]:
    """Four ranks of the test's own, to be killed and broken."""
    with lk.cluster.start(4) as started:
        yield started
