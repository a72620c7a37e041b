"""What `ranks.status()` shows: one line per rank."""

import html
from collections.abc import Iterator
from dataclasses import dataclass

from labkit.cluster.crew import Crew

SILENT_AFTER_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank as it is now.

    Attributes:
        rank: its number.
        pid: its process on `host`.
        host: where it runs.
        device: "cpu" or "cuda:<visible id>".
        state: idle, running, waiting, paused, silent (its agent does not answer) or lost.
        doing: the function that runs, or how the process ended.
        step: the training step, where one is under way.
        group: the generation of the process groups, 0 while they have to be built.
        memory_bytes: resident memory.
        heartbeat_age_s: seconds since its agent was last heard.
    """

    rank: int
    pid: int
    host: str
    device: str
    state: str
    doing: str
    step: int | None
    group: int
    memory_bytes: int
    heartbeat_age_s: float


class Status(tuple[RankStatus, ...]):
    """All ranks, in rank order; prints as a table."""

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Header and one row per rank, as text."""
        yield ("rank", "pid", "host", "device", "state", "doing", "step", "group", "memory", "heard")
        for one in self:
            step = "" if one.step is None else str(one.step)
            heard = f"{one.heartbeat_age_s:.1f} s ago" if one.heartbeat_age_s < 1e6 else "never"
            memory = f"{one.memory_bytes / 2**20:.0f} MiB"
            group = str(one.group) if one.group else "to be built"
            yield (str(one.rank), str(one.pid), one.host, one.device, one.state, one.doing, step, group, memory, heard)

    def __repr__(self) -> str:
        rows = list(self.rows())
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        """The same table in a notebook."""
        head, *body = [[html.escape(cell) for cell in row] for row in self.rows()]
        lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in body]
        top = "".join(f"<th>{cell}</th>" for cell in head)
        return f"<table><thead><tr>{top}</tr></thead><tbody><tr>{'</tr><tr>'.join(lines)}</tr></tbody></table>"


def take(crew: Crew, steps: dict[int, int]) -> Status:
    """Look at every rank without asking any: from the last heartbeats and the keeper's word."""
    return Status(_one(crew, rank, steps.get(rank)) for rank in sorted(crew.members))


def _one(crew: Crew, rank: int, step: int | None) -> RankStatus:
    member = crew.members[rank]
    age_s, beat = crew.hub.beat(rank)
    busy = beat.get("number", 0) > crew.answered.get(rank, 0)
    if member.lost:
        state, doing = "lost", member.lost
    elif member.paused:
        state, doing = "paused", ""
    elif age_s > SILENT_AFTER_S:
        state, doing = "silent", beat.get("name", "")
    elif busy:
        state, doing = ("waiting" if beat.get("waiting_s", 0.0) > SILENT_AFTER_S else "running"), beat.get("name", "")
    else:
        state, doing = "idle", ""
    visible = crew.devices.visible[rank]
    return RankStatus(
        rank=rank,
        pid=member.pid,
        host=crew.hub.hello(rank).get("host", ""),
        device=f"cuda:{visible}" if visible else "cpu",
        state=state,
        doing=doing,
        step=step if busy else None,
        group=0 if crew.stale else crew.generation,
        memory_bytes=int(beat.get("memory_bytes", 0)),
        heartbeat_age_s=age_s,
    )
