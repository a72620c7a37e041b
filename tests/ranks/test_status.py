"""`ranks.status()`: one line per rank, as text and as HTML."""

import time

import pytest

from labkit.cluster import Ranks
from labkit.cluster.status import RankStatus, Status
from tests.ranks import work

pytestmark = pytest.mark.ranks

TIMEOUT_S = 60.0


def wait_for(ranks: Ranks, states: dict[int, tuple[str, ...]]) -> Status:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        status = ranks.status()
        if all(status[rank].state in wanted for rank, wanted in states.items()):
            return status
        assert time.monotonic() < deadline, f"never {states}:\n{status}"
        time.sleep(0.05)


def test_idle_ranks(ranks: Ranks) -> None:
    ranks.run(work.sum_of_ranks)
    status = wait_for(ranks, dict.fromkeys(range(4), ("idle",)))
    assert [one.rank for one in status] == [0, 1, 2, 3]
    assert {one.rank: one.pid for one in status} == ranks.pids
    for one in status:
        assert one.device == "cpu"
        assert one.host
        assert one.memory_bytes > 10 << 20
        assert one.group == ranks.token
        assert one.doing == ""
        assert one.step is None


def test_running_ranks_say_what_they_do(ranks: Ranks) -> None:
    call = ranks.run(time.sleep, 600, ranks=[1, 2], block=False)
    status = wait_for(ranks, {0: ("idle",), 1: ("running", "waiting"), 2: ("running", "waiting"), 3: ("idle",)})
    assert (status[1].doing, status[2].doing) == ("sleep", "sleep")
    ranks.interrupt(timeout_s=TIMEOUT_S)
    assert call.wait(TIMEOUT_S)
    wait_for(ranks, dict.fromkeys(range(4), ("idle",)))


def test_paused_and_lost_ranks(ranks: Ranks) -> None:
    ranks.pause(1)
    assert ranks.status()[1].state == "paused"
    ranks.resume(1)
    ranks.kill(3)
    status = ranks.status()
    assert (status[3].state, status[3].doing) == ("lost", "SIGKILL")
    assert "to be built" in repr(status)
    ranks.restart(3)
    wait_for(ranks, dict.fromkeys(range(4), ("idle",)))


def example(rank: int, doing: str) -> RankStatus:
    return RankStatus(
        rank=rank,
        pid=100 + rank,
        host="here",
        device="cpu",
        state="running",
        doing=doing,
        step=7,
        group=2,
        memory_bytes=5 << 20,
        heartbeat_age_s=0.25,
    )


def test_the_table_is_aligned() -> None:
    lines = repr(Status([example(0, "f"), example(1, "a_longer_name")])).splitlines()
    assert lines == [
        "rank  pid  host  device  state    doing          step  group  memory  heard",
        "0     100  here  cpu     running  f              7     2      5 MiB   0.2 s ago",
        "1     101  here  cpu     running  a_longer_name  7     2      5 MiB   0.2 s ago",
    ]


def test_the_table_of_a_notebook_is_html() -> None:
    text = Status([example(0, "<lambda>")])._repr_html_()
    assert text.count("<tr>") == 2
    assert "&lt;lambda&gt;" in text
    assert "<lambda>" not in text
