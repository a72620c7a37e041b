"""Judging a hand-written all-reduce: whether what each member returned is the sum, and what it sent for it."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from labkit.exercise import Case, Finding

__all__ = ["collective_called", "longest_chain", "sent", "sum_fault", "through"]

# The form in which the trial gives long results.
BLOCK = 4096

Calls = Sequence[Sequence[Any]]


def sum_fault(case: Case, values: Sequence[Any]) -> Finding | None:
    """The first member that did not return the sum, or None when all did."""
    size = case.inputs["size"]
    given = f"x of {size} numbers on each of {len(case.members)} ranks"
    for rank, value in enumerate(values):
        result = value["result"]
        wrong = ""
        if result["type"] != "Tensor":
            wrong = f"{_who(case, rank)} returned {result['type']} instead of a tensor: return the sum"
        elif result["shape"] != [size]:
            wrong = f"{_who(case, rank)} returned shape {result['shape']}, but x has shape [{size}]"
        elif result["dtype"] != "float32":
            wrong = f"{_who(case, rank)} returned {result['dtype']}, but x is float32"
        elif "values" not in result and "blocks" not in result:
            wrong = f"{_who(case, rank)} returned a tensor without numbers to read, but x is dense and on a device"
        if wrong:
            return Finding(passed=False, message=wrong + ".", given=given, idea="result")
    return _wrong_numbers(case, values, given)


def collective_called(values: Sequence[Any]) -> Finding | None:
    """A finding when a member called anything but send and recv."""
    for rank, value in enumerate(values):
        for operation, *_ in value["calls"]:
            if operation not in ("send", "recv"):
                message = (
                    f"rank {rank} of {len(values)} called {operation}: build the sum from send, recv, isend, irecv or "
                    "batch_isend_irecv alone."
                )
                return Finding(passed=False, message=message, idea="collective")
    return None


def sent(calls: Calls) -> tuple[int, int, int]:
    """How many messages a member sent, their bytes, and to how many different ranks."""
    messages = [(num_bytes, peer) for operation, num_bytes, peer in calls if operation == "send"]
    return len(messages), sum(one[0] for one in messages), len({one[1] for one in messages})


def through(calls: Calls) -> int:
    """Bytes that a member sent and received."""
    return sum(num_bytes for operation, num_bytes, _ in calls if operation in ("send", "recv"))


def longest_chain(by_rank: Sequence[Calls]) -> int:
    """The most messages in a row that had to wait for each other, by the order of calls on each member.

    A send waits for all that its rank received before. Receives that were posted before the matching send could start
    (both sides post theirs first, then send) hold nothing up.

    >>> longest_chain([[("recv", 4, 1), ("send", 4, 1)], [("send", 4, 0), ("recv", 4, 0)]])
    2
    """
    todo = [deque(one for one in calls if one[0] in ("send", "recv")) for calls in by_rank]
    depths = [0] * len(by_rank)
    under_way: dict[tuple[int, int], deque[int]] = {}
    posted: list[tuple[int, int]] = []
    while any(todo):
        moved = [_advance(rank, calls, depths, under_way) for rank, calls in enumerate(todo)]
        if not any(moved):
            # Only receives are left in front, and nothing is under way to them: they were posted early.
            posted += [(one.popleft()[2], rank) for rank, one in enumerate(todo) if one]
        posted = [one for one in posted if not _arrives(one, depths, under_way)]
    return max(depths, default=0)


def _advance(rank: int, todo: deque[Any], depths: list[int], under_way: dict[tuple[int, int], deque[int]]) -> bool:
    """Do what this rank can do; returns whether that was anything."""
    before = len(todo)
    while todo:
        operation, _, peer = todo[0]
        if operation == "send":
            under_way.setdefault((rank, peer), deque()).append(depths[rank] + 1)
        elif not _arrives((peer, rank), depths, under_way):
            break
        todo.popleft()
    return len(todo) < before


def _arrives(way: tuple[int, int], depths: list[int], under_way: dict[tuple[int, int], deque[int]]) -> bool:
    if not under_way.get(way):
        return False
    depths[way[1]] = max(depths[way[1]], under_way[way].popleft())
    return True


def _numbers(case: Case) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The right sum."""
    index = np.arange(case.inputs["size"], dtype=np.int64)
    parts = [(index * 7 + rank * 13 + case.inputs["seed"]) % 19 - 9 for rank in range(len(case.members))]
    total: np.ndarray[Any, np.dtype[np.int64]] = np.sum(parts, axis=0)
    return total


def _wrong_numbers(case: Case, values: Sequence[Any], given: str) -> Finding | None:
    wanted = _numbers(case)
    if any("blocks" in value["result"] for value in values):
        return _wrong_blocks(case, values, wanted, given)
    wrong = np.array([np.asarray(value["result"]["values"], dtype=float) != wanted for value in values])
    if not wrong.any():
        return None
    rank = int(np.argmax(wrong.any(axis=1)))
    first = int(np.argmax(wrong[rank]))
    got = values[rank]["result"]["values"]
    idea, message = _diagnosis(case, wrong, rank)
    return Finding(
        passed=False,
        message=message or _first_wrong(case, rank, int(wrong[rank].sum()), first, got[first], int(wanted[first])),
        given=given,
        got=f"rank {rank}: {_few(got)}",
        wanted=_few(wanted.tolist()),
        idea=idea,
    )


def _diagnosis(case: Case, wrong: np.ndarray[Any, Any], rank: int) -> tuple[str, str]:
    """The idea behind numbers that are wrong, and the sentence for those mistakes that show."""
    num_members, size = wrong.shape
    rest = size % num_members
    if rest and not wrong[:, :-rest].any():
        return "rest", (
            f"the last {rest} of {size} numbers are not the sum: {size} does not divide among {num_members} ranks, "
            "and the rest was left out."
        )
    num_wrong = wrong.sum(axis=1)
    if num_members > 1 and not wrong.all(axis=0).any() and (num_wrong * 2 >= size).all():
        return "half", (
            f"{_who(case, rank)} has the sum in only {size - num_wrong[rank]} of {size} numbers, and the other ranks "
            "hold the rest: after the reduce phase the finished chunks must go round once more."
        )
    return _idea(case), ""


def _idea(case: Case) -> str:
    if _own_ranks(case):
        return "group"
    return "sum" if len(case.members) in (1, 2, 4) else "powers"


def _first_wrong(case: Case, rank: int, num_wrong: int, first: int, got: float, wanted: int) -> str:
    size = case.inputs["size"]
    return (
        f"{num_wrong} of {size} number{'s' * (size != 1)} on {_who(case, rank)} {_is(num_wrong)} not the sum: number "
        f"{first} is {got:g} instead of {wanted}."
    )


def _wrong_blocks(case: Case, values: Sequence[Any], wanted: Any, given: str) -> Finding | None:
    size = len(wanted)
    padded = np.zeros(-(-size // BLOCK) * BLOCK)
    padded[:size] = wanted
    blocks = padded.reshape(-1, BLOCK)
    right = np.array([blocks.sum(1), blocks @ np.arange(1, BLOCK + 1)])
    for rank, value in enumerate(values):
        wrong = (np.asarray(value["result"]["blocks"], dtype=float) != right).any(axis=0)
        if wrong.any():
            start = int(np.argmax(wrong)) * BLOCK
            message = (
                f"{_who(case, rank)} does not have the sum: the first wrong one of {size} numbers is among "
                f"numbers {start} to {min(start + BLOCK, size) - 1}."
            )
            return Finding(passed=False, message=message, given=given, idea=_idea(case))
    return None


def _own_ranks(case: Case) -> bool:
    """Whether the group counts its ranks otherwise than the world."""
    return case.members != tuple(range(len(case.members)))


def _who(case: Case, rank: int) -> str:
    if _own_ranks(case):
        return f"rank {rank} of the group ({', '.join(map(str, case.members))})"
    return f"rank {rank} of {len(case.members)}"


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _few(values: Sequence[float]) -> str:
    texts = [f"{value:g}" for value in values[:8]]
    return f"[{', '.join(texts)}{', ...' if len(values) > 8 else ''}]"
