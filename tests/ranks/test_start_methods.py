"""Forked and spawned ranks, starts that fail or are cut short."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest

import labkit as lk
from labkit.cluster import keeping, starting
from labkit.errors import ClusterError, PlanError
from tests.ranks import waits

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIMEOUT_S = 60.0


def secrets_seen(process: psutil.Process, secrets: list[str]) -> bool:
    text = " ".join(process.cmdline()) + " ".join(process.environ().values())
    return any(secret in text for secret in secrets)


def test_spawned_ranks_run_are_interrupted_and_restarted() -> None:
    with lk.cluster.start(2, start_method="spawn") as ranks:
        assert "spawned" in repr(ranks)
        before = ranks.pids
        key = ranks._crew._key.hex()
        for pid in before.values():
            assert not secrets_seen(psutil.Process(pid), [key])
        assert ranks.run(waits.sum_of_ranks) == [1.0] * 2
        call = ranks.run(waits.sleep, block=False)
        ranks.interrupt(timeout_s=TIMEOUT_S)
        assert call.done
        assert ranks.pids == before
        ranks.restart(1)
        assert ranks.run(waits.sum_of_ranks) == [1.0] * 2
        assert ranks.pids[0] == before[0]


def test_spares_need_fork() -> None:
    with pytest.raises((ClusterError, PlanError), match="fork"):
        lk.cluster.start(1, spares=1, start_method="spawn")


def test_preload_leaves_one_thread() -> None:
    """A process with threads cannot be forked safely."""
    keeper = keeping.Keeping()
    try:
        environment = starting._environment(1)
        path = keeping.python_seat()["path"]
        preload = keeper.order("preload", env=environment, path=path, modules=starting.PRELOAD)
        keeper.listen(lambda pid, code: None, lambda: None)
        assert keeper.answer(preload, "preload", 240.0)["num_threads"] == 1
    finally:
        keeper.stop()


def test_a_start_that_is_too_slow_leaves_nothing() -> None:
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    with pytest.raises(ClusterError):
        lk.cluster.start(1, timeout_s=0.2)
    assert {one.pid for one in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.5, 1.5])
def test_ctrl_c_during_start_leaves_nothing(delay_s: float) -> None:
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    timer = threading.Timer(delay_s, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        with lk.cluster.start(2):
            time.sleep(TIMEOUT_S)
    timer.join()
    assert {one.pid for one in psutil.Process().children(recursive=True)} <= before


def test_two_clusters_at_once(ranks: lk.cluster.Ranks) -> None:
    with lk.cluster.start(2) as others:
        assert others.run(waits.sum_of_ranks) == [1.0] * 2
        assert ranks.run(waits.sum_of_ranks) == [6.0] * 4
        call = ranks.run(waits.sum_of_ranks, block=False)
        others.kill(0)
        assert call.result(TIMEOUT_S) == [6.0] * 4
    assert ranks.run(waits.sum_of_ranks) == [6.0] * 4


def test_a_child_of_the_owner_is_told_that_the_ranks_are_not_its_own(ranks: lk.cluster.Ranks) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ranks.run(waits.sum_of_ranks)
        except ClusterError as error:
            os.write(write, str(error).encode())
        finally:
            ranks.stop()  # must not end the owner's ranks
            os._exit(0)
    os.waitpid(pid, 0)
    assert f"belong to process {os.getpid()}" in os.read(read, 4096).decode()
    os.close(read)
    os.close(write)
    assert ranks.run(waits.sum_of_ranks) == [6.0] * 4


def test_everything_listens_on_loopback_and_shows_no_key(ranks: lk.cluster.Ranks) -> None:
    crew = ranks._crew
    keeper = psutil.Process(crew.keeping.pid)
    processes = [keeper, *keeper.children(recursive=True)]
    ipyparallel_key = crew.engines.client.session.key.decode()
    listening = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that an earlier test's call left, ending just now
            assert not secrets_seen(process, [crew._key.hex(), ipyparallel_key])
            listening += [one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    assert len(listening) > 5
    assert {ip.removeprefix("::ffff:") for ip in listening} <= {"127.0.0.1", "::1"}


def test_files_of_the_cluster_are_for_their_owner_alone(ranks: lk.cluster.Ranks) -> None:
    folder = Path(ranks._crew.keeping.folder)
    assert not folder.stat().st_mode & 0o077
    secret = [*folder.glob("*.log"), *folder.glob("profile/security/*.json")]
    assert len(secret) >= 8  # keeper, controller, store, four ranks, ipyparallel's keys
    assert not [path for path in secret if path.stat().st_mode & 0o077]
