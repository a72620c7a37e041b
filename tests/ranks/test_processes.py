"""Kill, pause, resume, restart and spares: numbers stay, other ranks' processes stay, nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import cloudpickle
import psutil
import pytest

import labkit as lk
from labkit.cluster import Ranks
from labkit.errors import ClusterError, RankError, RankLost, RankTimeout
from tests import shared_memory
from tests.ranks import waits

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIMEOUT_S = 60.0


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S:g} s: {what}"
        time.sleep(0.02)


def runs(process: psutil.Process) -> bool:
    """Whether a process is there, not counting one that nobody has collected yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_right(ranks: Ranks) -> None:
    assert ranks.run(waits.sum_of_ranks) == [float(sum(range(len(ranks))))] * len(ranks)


@pytest.fixture(scope="module", autouse=True)
def sentinel() -> Iterator[None]:
    """A process of the user's own, which nothing here may touch."""
    with subprocess.Popen(["sleep", "3600"]) as process:
        yield
        assert process.poll() is None, "a process that labkit did not start was signalled"
        process.kill()


@pytest.fixture
def broken(ranks: Ranks) -> Iterator[Ranks]:
    """The shared ranks, to be killed; they are brought back afterwards."""
    yield ranks
    for rank in set(range(4)) - set(ranks.pids):
        ranks.restart(rank)


def test_kill_and_restart_keep_the_number_and_the_others(broken: Ranks) -> None:
    before = broken.pids
    broken.kill(2)
    assert sorted(broken.pids) == [0, 1, 3]
    assert broken.status()[2].state == "lost"
    assert broken.status()[2].doing == "SIGKILL"
    with pytest.raises(RankLost, match=r"ranks\.restart\(2\)") as caught:
        broken.run(waits.sum_of_ranks)
    assert (caught.value.rank, caught.value.signal, caught.value.lost) == (2, "SIGKILL", (2,))
    broken.restart(2)
    after = broken.pids
    assert after == {**before, 2: after[2]}
    assert after[2] != before[2]
    assert_right(broken)


def test_survivors_can_be_used_without_the_dead(broken: Ranks) -> None:
    broken.kill(0)
    assert broken.run(lambda: waits.os.environ["LABKIT_RANK"], ranks=[3, 1]) == ["3", "1"]


def test_death_during_a_call_frees_the_others_and_is_named(broken: Ranks) -> None:
    before = broken.pids

    def dies() -> None:
        if waits.dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        waits.dist.barrier()

    with pytest.raises(RankLost) as caught:
        broken.run(dies, timeout_s=TIMEOUT_S)
    assert (caught.value.rank, caught.value.signal) == (1, "SIGSEGV")
    assert "[rank 1] process was killed by SIGSEGV during" in str(caught.value)
    assert "ranks.restart(1)" in str(caught.value)
    broken.restart(1)
    assert_right(broken)
    assert broken.pids == {**before, 1: broken.pids[1]}


def test_a_rank_that_exits_by_itself_is_named(broken: Ranks) -> None:
    def leaves() -> None:
        if waits.dist.get_rank() == 3:
            os._exit(7)

    with pytest.raises(RankLost, match="exit code 7") as caught:
        broken.run(leaves, timeout_s=TIMEOUT_S)
    assert (caught.value.rank, caught.value.signal) == (3, "")


def test_two_and_all_dead_are_brought_back_one_by_one(broken: Ranks) -> None:
    before = broken.pids
    broken.kill(1)
    os.kill(before[3], signal.SIGKILL)
    until(lambda: sorted(broken.pids) == [0, 2], "two ranks are gone")
    with pytest.raises(RankLost) as caught:
        broken.run(waits.sum_of_ranks)
    assert caught.value.lost == (1, 3)
    broken.restart(1)
    broken.restart(3)
    assert_right(broken)
    for rank in range(4):
        broken.kill(rank)
    assert broken.pids == {}
    for rank in (2, 0, 3, 1):
        broken.restart(rank)
    assert_right(broken)


def test_restart_of_a_living_rank_ends_what_runs_elsewhere(broken: Ranks) -> None:
    before = broken.pids
    call = broken.run(waits.barrier, block=False)
    broken.restart(0)
    assert broken.pids == {**before, 0: broken.pids[0]}
    assert broken.pids[0] != before[0]
    with pytest.raises((RankLost, RankError)):
        call.result(TIMEOUT_S)
    assert_right(broken)


def test_pause_and_resume(broken: Ranks) -> None:
    before = broken.pids
    broken.pause(1)
    until(lambda: psutil.Process(before[1]).status() == psutil.STATUS_STOPPED, "the process is stopped")
    assert broken.status()[1].state == "paused"
    call = broken.run(waits.sum_of_ranks, block=False)
    with pytest.raises(RankTimeout) as caught:
        call.result(0.5)
    assert 1 in caught.value.missing
    broken.resume(1)
    assert call.result(TIMEOUT_S) == [6.0] * 4
    assert broken.pids == before
    broken.kill(1)
    with pytest.raises(ClusterError, match="only a living rank can be paused"):
        broken.pause(1)
    with pytest.raises(ClusterError, match=r"ranks\.restart\(1\)"):
        broken.resume(1)


def test_a_paused_rank_can_be_killed(broken: Ranks) -> None:
    broken.pause(2)
    broken.kill(2)
    broken.restart(2)
    assert_right(broken)


def start_processes() -> list[int]:
    """In a rank: children of every kind, and shared memory."""
    import builtins
    import multiprocessing
    from multiprocessing import shared_memory

    import torch

    plain = subprocess.Popen(["sleep", "3600"])
    own_session = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
    forked.start()
    tensor = torch.ones(1 << 16).share_memory_()
    memory = shared_memory.SharedMemory(create=True, size=1 << 16)
    builtins.labkit_test_kept = [plain, own_session, forked, tensor, memory]  # type: ignore[attr-defined]
    return [plain.pid, own_session.pid, forked.pid]


def test_what_a_killed_rank_had_started_ends_with_it(broken: Ranks) -> None:
    files = shared_memory.files()
    pids = broken.run(start_processes)
    broken.kill(1)
    until(lambda: not any(map(psutil.pid_exists, pids[1])), "what rank 1 had started is gone")
    assert all(map(psutil.pid_exists, pids[0] + pids[2] + pids[3]))
    for rank in (0, 2, 3):
        broken.kill(rank)
    until(lambda: not any(psutil.pid_exists(pid) for one in pids for pid in one), "everything else is gone too")
    until(lambda: not shared_memory.left_since(files), "shared memory is gone")


def test_spares_take_the_place_of_the_dead() -> None:
    with lk.cluster.start(2, spares=1) as ranks:
        assert ranks.spares == 1
        (spare,) = ranks._crew.spare_pids
        ranks.kill(0)
        ranks.restart(0)
        assert ranks.pids[0] == spare
        assert ranks.spares == 0
        assert_right(ranks)
        ranks.kill(0)
        ranks.restart(0)
        assert_right(ranks)


def test_death_of_the_store_is_mended_and_of_the_controller_is_said() -> None:
    with lk.cluster.start(2) as ranks:
        before = ranks.pids
        store = ranks._crew._store_pid
        os.kill(store, signal.SIGKILL)
        until(lambda: ranks._crew.stale, "the store's end is noticed")
        assert_right(ranks)
        assert ranks.pids == before

        call = ranks.run(waits.sleep, block=False)
        os.kill(ranks._crew.engines.controller_pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match=r"controller .* ended .*Start new ones"):
            call.result(TIMEOUT_S)
        with pytest.raises(ClusterError, match="controller"):
            ranks.run(waits.sum_of_ranks)
        with pytest.raises(ClusterError, match="controller"):
            ranks.interrupt()
    assert ranks.stopped


def test_death_of_the_keeper_ends_everything_and_is_said() -> None:
    files = shared_memory.files()
    ranks = lk.cluster.start(2)
    keeper = psutil.Process(ranks._crew.keeping.pid)
    processes = keeper.children(recursive=True)
    started = [psutil.Process(pid) for pid in ranks.run(start_processes)[1]]
    folder = ranks._crew.keeping.folder
    call = ranks.run(waits.sleep, block=False)
    keeper.kill()
    with pytest.raises(ClusterError, match=r"keeper .* ended.*Start new ones"):
        call.result(TIMEOUT_S)
    with pytest.raises(ClusterError, match="keeper"):
        ranks.run(waits.sum_of_ranks)
    until(lambda: not any(map(runs, processes + started)), "all processes are gone")
    until(lambda: not os.path.exists(folder), "the folder is gone")
    until(lambda: not shared_memory.left_since(files), "shared memory is gone")
    ranks.stop()
    ranks.stop()
    with pytest.raises(ClusterError, match="stopped"):
        ranks.run(waits.sum_of_ranks)
