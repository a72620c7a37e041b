"""The keeper alone: what it starts, signals and ends, and what it leaves on disk."""

import os
import signal
import stat
import sys
import time

import psutil
import pytest

from labkit.cluster.keeping import Keeping
from labkit.errors import ClusterError

pytestmark = pytest.mark.ranks

TIMEOUT_S = 60.0
SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]


class Kept:
    def __init__(self) -> None:
        self.exits: dict[int, int] = {}
        self.gone = False
        self.keeping = Keeping()
        self.keeping.listen(self.exits.__setitem__, lambda: setattr(self, "gone", True))

    def program(self, argv: list[str], **more) -> int:
        return self.keeping.command("program", name="test", argv=argv, env=dict(os.environ), **more)["pid"]


@pytest.fixture
def kept():
    one = Kept()
    yield one
    one.keeping.stop()


def until(true, what: str = "") -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_exits_are_told_with_their_codes(kept: Kept) -> None:
    killed = kept.program(SLEEP)
    left = kept.program([sys.executable, "-c", "raise SystemExit(3)"])
    assert kept.keeping.command("signal", pid=killed, signal=int(signal.SIGTERM))["sent"]
    until(lambda: {killed, left} <= set(kept.exits))
    assert (kept.exits[killed], kept.exits[left]) == (-signal.SIGTERM, 3)
    assert not kept.keeping.command("signal", pid=killed, signal=int(signal.SIGKILL))["sent"]


def test_processes_that_are_not_its_own_are_never_signalled(kept: Kept) -> None:
    assert not kept.keeping.command("signal", pid=os.getpid(), signal=int(signal.SIGTERM))["sent"]
    assert not kept.keeping.command("signal", pid=1, signal=int(signal.SIGTERM))["sent"]
    assert not kept.keeping.command("signal", pid=kept.keeping.pid, signal=int(signal.SIGKILL))["sent"]


def test_files_are_for_their_owner_alone(kept: Kept) -> None:
    kept.program(SLEEP)
    assert stat.S_IMODE(os.stat(kept.keeping.folder).st_mode) == 0o700
    files = [os.path.join(kept.keeping.folder, name) for name in os.listdir(kept.keeping.folder)]
    assert len(files) >= 2
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in files if os.path.isfile(path)} == {0o600}


def test_commands_of_any_size_and_many_at_once(kept: Kept) -> None:
    code = f"import sys; text = sys.stdin.read(); sys.exit(len(text) == {4 << 20})"
    pid = kept.program([sys.executable, "-c", code], stdin="x" * (4 << 20))
    until(lambda: pid in kept.exits)
    assert kept.exits[pid] == 1
    orders = [kept.keeping.order("signal", pid=1, signal=0) for _ in range(2000)]
    assert not any(kept.keeping.answer(one, "signal")["sent"] for one in orders)


def test_what_cannot_be_done_is_said_and_ends_nothing(kept: Kept) -> None:
    with pytest.raises(ClusterError, match="no/such/program"):
        kept.program(["/no/such/program"])
    with pytest.raises(ClusterError, match="nonsense"):
        kept.keeping.command("nonsense")
    number = kept.keeping.order("preload", env={}, path=sys.path, modules=["labkit.no_such_module"])
    with pytest.raises(ClusterError, match="no_such_module"):
        kept.keeping.answer(number, "preload")
    pid = kept.program(SLEEP)
    assert psutil.pid_exists(pid)


def test_stop_ends_all_descendants_and_the_folder(kept: Kept) -> None:
    starts = "subprocess.Popen(['sleep', '3600'], start_new_session=True)"
    kept.program([sys.executable, "-c", f"import subprocess, time; {starts}; time.sleep(3600)"])
    keeper = psutil.Process(kept.keeping.pid)
    until(lambda: any(one.name() == "sleep" for one in keeper.children(recursive=True)))
    processes = [keeper, *keeper.children(recursive=True)]
    kept.keeping.stop()
    kept.keeping.stop()
    assert not any(one.is_running() for one in processes)
    assert not os.path.exists(kept.keeping.folder)
    with pytest.raises(ClusterError, match="gone"):
        kept.keeping.command("signal", pid=1, signal=0)


def test_orphans_end_with_the_child_that_left_them(kept: Kept) -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '3600']); time.sleep(3600)"
    one, other = (kept.program([sys.executable, "-c", code]) for _ in range(2))

    def sleeps(pid: int) -> list[psutil.Process]:
        return [child for child in psutil.Process(pid).children() if child.name() == "sleep"]

    until(lambda: sleeps(one) and sleeps(other))
    (orphan,), (kept_one,) = sleeps(one), sleeps(other)
    kept.keeping.command("signal", pid=one, signal=int(signal.SIGKILL))
    until(lambda: not orphan.is_running())
    assert kept_one.is_running()


def test_a_killed_keeper_takes_its_children_along_and_is_noticed(kept: Kept) -> None:
    pid = kept.program(SLEEP)
    os.kill(kept.keeping.pid, signal.SIGKILL)
    until(lambda: kept.gone)
    until(lambda: not psutil.pid_exists(pid))
    with pytest.raises(ClusterError, match="gone"):
        kept.keeping.command("signal", pid=pid, signal=0)
    os.unlink(os.path.join(kept.keeping.folder, "keeper.log"))
    os.unlink(os.path.join(kept.keeping.folder, "test.log"))
    os.rmdir(kept.keeping.folder)
