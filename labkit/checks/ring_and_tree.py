"""Chapter 06: an all-reduce as a ring and as a tree, and the message size where they take equal time."""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from labkit.checks.reductions import collective_called, longest_chain, sent, sum_fault, through
from labkit.checks.ring_and_tree_ideas import RING_IDEAS, TREE_IDEAS
from labkit.exercise import Case, Criterion, Exercise, Finding, Measure

__all__ = ["RING", "TREE", "crossover_bytes"]

CHAPTER = "06_ring_and_tree"
SUM = "labkit.rank.trials.all_reduce:all_reduce"
COSTS = "labkit.rank.trials.all_reduce:costs"
ITEM_BYTES = 4
TOLERANCE = 0.1
# Chains among more calls than this are not followed: they are too long in any case.
MAX_CALLS = 2000
# (alpha in s, beta in s per byte, ranks): a data centre as in NCCL's notes, Ethernet, loopback, a slow link.
LINKS = ((5e-6, 1 / 25e9), (20e-6, 1 / 12.5e9), (60e-6, 1 / 1.25e9), (30e-6, 1 / 2e9), (500e-6, 1 / 125e6))


def _sum_case(
    answer: str, criterion: str, members: tuple[int, ...], size: int, *, seed: int, hidden: bool = False
) -> Case:
    count = len(members)
    order = "" if members == tuple(range(count)) else f" ({', '.join(map(str, members))})"
    amount = f"{size} number{'s' * (size != 1)}" if size < 10**6 else f"{size * ITEM_BYTES / 2**20:.0f} MiB"
    return Case(
        name=f"{count} rank{'s' * (count != 1)}{order}, {amount}",
        criterion=criterion,
        trial=SUM,
        members=members,
        inputs={"answer": answer, "size": size, "seed": seed},
        hidden=hidden,
    )


def _ring_cases(seed: int) -> tuple[Case, ...]:
    name = "ring_all_reduce"
    draw = random.Random(seed)
    data = draw.randrange(1000)
    return (
        _sum_case(name, "sum", (0, 1), 4, seed=0),
        _sum_case(name, "sum", (0, 1, 2, 3), 8, seed=1),
        _sum_case(name, "any", (0, 1, 2), 5, seed=2),
        _sum_case(name, "any", (3, 1), 6, seed=3),
        _sum_case(name, "budget", (0, 1, 2, 3), 1024, seed=4),
        _sum_case(name, "sum", (0, 1, 2, 3), 4 * draw.randrange(5, 40), seed=data, hidden=True),
        _sum_case(name, "any", (0, 1, 2, 3), 0, seed=data, hidden=True),
        _sum_case(name, "any", (0, 1, 2, 3), 1, seed=data, hidden=True),
        _sum_case(name, "any", (2,), 5, seed=data, hidden=True),
        _sum_case(name, "any", (2, 3, 0), 3 * draw.randrange(10, 30) + 1, seed=data, hidden=True),
        _sum_case(name, "any", (1, 3, 0, 2), 4 * draw.randrange(10, 30) + 3, seed=data, hidden=True),
        _sum_case(name, "budget", (3, 2), 2 * draw.randrange(100, 200) + 1, seed=data, hidden=True),
        _sum_case(name, "budget", (1, 2, 0), 3 * draw.randrange(100, 200) + 2, seed=data, hidden=True),
        _sum_case(name, "budget", (0, 1, 2, 3), 2**22 + draw.randrange(1, 4), seed=data, hidden=True),
    )


def _judge_ring(case: Case, values: tuple[Any, ...]) -> Finding:
    if fault := collective_called(values) or sum_fault(case, values):
        return fault
    world_size, size = len(values), case.inputs["size"]
    chunk_bytes = -(-size // world_size) * ITEM_BYTES
    num_sends, decides = 2 * (world_size - 1), case.criterion == "budget"
    by_rank = [sent(value["calls"]) for value in values]
    rank = max(range(world_size), key=lambda one: by_rank[one])
    messages, num_bytes, peers = (max(column) for column in zip(*by_rank, strict=True))
    measures = (
        _measure("messages sent by a rank", messages, num_sends, decides),
        _measure("bytes sent by a rank", num_bytes, num_sends * chunk_bytes, decides, unit="B"),
        _measure("ranks that a rank sends to", peers, 1, decides),
    )
    wrong, idea = "", "budget"
    if messages > num_sends:
        wrong = f"rank {rank} of {world_size} sent {messages} messages; a ring sends at most 2 x (N - 1) = {num_sends}."
    elif peers > 1:
        wrong = (
            f"a rank sent to {peers} other ranks; in a ring each of the {world_size} ranks sends to 1, its neighbour."
        )
        idea = "neighbour"
    elif num_bytes > num_sends * chunk_bytes:
        wrong = (
            f"a rank sent {num_bytes} B; a ring of {world_size} ranks sends at most {num_sends} chunks of "
            f"{chunk_bytes} B = {num_sends * chunk_bytes} B a rank."
        )
    elif (shortage := _shortage(by_rank, size)) and world_size > 1:
        wrong, idea = shortage, "unseen"
    if decides and wrong:
        return Finding(passed=False, message=wrong, idea=idea, measures=measures)
    return Finding(passed=True, measures=measures)


def _measure(name: str, value: int, most: int, decides: bool, *, unit: str = "") -> Measure:
    """A count; beside the most that it may be only in the cases that it decides."""
    return Measure(name=name, value=value, budget=most if decides else None, unit=unit)


def _shortage(by_rank: Sequence[tuple[int, int, int]], size: int) -> str:
    """Words for less traffic than any all-reduce can do with: N - 1 tensors to add up, N - 1 to tell everybody."""
    total, least = sum(one[1] for one in by_rank), 2 * (len(by_rank) - 1) * size * ITEM_BYTES
    if total >= least:
        return ""
    return (
        f"the ranks sent {total} B in all, and adding up {size} float32 numbers of {len(by_rank)} ranks takes at least "
        f"{least} B: send float32, from the thread that runs the function."
    )


RING = Exercise(
    question="06.1",
    title="Ring all-reduce",
    chapter=CHAPTER,
    answers=("ring_all_reduce",),
    criteria=(
        Criterion(name="sum", points=2, text="the sum on every rank, 2 and 4 ranks"),
        Criterion(name="any", points=3, text="any number of ranks, any size, any group"),
        Criterion(name="budget", points=5, text="at most 2 (N - 1) chunks sent, to one neighbour"),
    ),
    cases=_ring_cases,
    judge=_judge_ring,
    ideas=RING_IDEAS,
)


def _tree_cases(seed: int) -> tuple[Case, ...]:
    name = "tree_all_reduce"
    draw = random.Random(seed)
    data = draw.randrange(1000)
    return (
        _sum_case(name, "sum", (0, 1), 4, seed=0),
        _sum_case(name, "sum", (0, 1, 2, 3), 8, seed=1),
        _sum_case(name, "any", (0, 1, 2), 5, seed=2),
        _sum_case(name, "any", (3, 1), 6, seed=3),
        _sum_case(name, "budget", (0, 1, 2, 3), 1024, seed=4),
        _cost_case("crossover_bytes", "crossover", [(*LINKS[0], 64), (*LINKS[1], 8), (*LINKS[2], 4)]),
        _cost_case("faster", "faster", [(4096, *LINKS[0], 64), (10**9, *LINKS[0], 64)]),
        _sum_case(name, "sum", (0, 1, 2, 3), draw.randrange(5, 100), seed=data, hidden=True),
        _sum_case(name, "any", (0, 1, 2, 3), 0, seed=data, hidden=True),
        _sum_case(name, "any", (2,), 5, seed=data, hidden=True),
        _sum_case(name, "any", (3, 2), draw.randrange(10, 100), seed=data, hidden=True),
        _sum_case(name, "any", (2, 3, 0), draw.randrange(10, 100), seed=data, hidden=True),
        _sum_case(name, "any", (1, 3, 0, 2), draw.randrange(10, 100), seed=data, hidden=True),
        _sum_case(name, "budget", (1, 2, 0), draw.randrange(100, 500), seed=data, hidden=True),
        _sum_case(name, "budget", (3, 1, 2, 0), 2**18 + draw.randrange(9), seed=data, hidden=True),
        _cost_case(
            "crossover_bytes",
            "crossover",
            [(*draw.choice(LINKS), count) for count in (2, 3, 4, 5, 6, 7, 9, 16, 48, 100, 1000, 16384)],
            hidden=True,
        ),
        _cost_case("faster", "faster", list(_sizes_around_crossovers(draw)), hidden=True),
    )


def _cost_case(answer: str, criterion: str, questions: list[tuple[Any, ...]], *, hidden: bool = False) -> Case:
    return Case(
        name=f"{answer}, {len(questions)} links{' more' if hidden else ''}",
        criterion=criterion,
        trial=COSTS,
        members=(0,),
        inputs={"answer": answer, "questions": questions},
        hidden=hidden,
    )


def _sizes_around_crossovers(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    """Messages clearly below and clearly above the crossover of a link, of any number of ranks."""
    for world_size in (2, 3, 4, 5, 8, 17, 64, 1024):
        link = draw.choice(LINKS)
        crossover = crossover_bytes(*link, world_size) or 1000.0
        for factor in (0.02, 0.5, 2.0, 50.0):
            yield (max(1, round(crossover * factor)), *link, world_size)


def crossover_bytes(alpha_s: float, beta_s_per_byte: float, world_size: int) -> float:
    """Where 2 (N - 1) (alpha + n beta / N) equals 2 ceil(log2 N) (alpha + n beta), in bytes; 0 for N = 2 and 3.

    >>> round(crossover_bytes(5e-6, 1 / 25e9, 64))
    1420561
    """
    levels = _levels(world_size)
    return alpha_s / beta_s_per_byte * (world_size - 1 - levels) / (levels - (world_size - 1) / world_size)


def _levels(world_size: int) -> int:
    """ceil(log2 N)."""
    return (world_size - 1).bit_length()


def _judge_tree(case: Case, values: tuple[Any, ...]) -> Finding:
    if case.inputs["answer"] == "crossover_bytes":
        return _judge_crossover(case, values[0])
    if case.inputs["answer"] == "faster":
        return _judge_faster(case, values[0])
    if fault := collective_called(values) or sum_fault(case, values):
        return fault
    calls = [value["calls"] for value in values]
    world_size, levels, decides = len(values), _levels(len(values)), case.criterion == "budget"
    amounts = [through(one) for one in calls]
    most = 2 * levels * case.inputs["size"] * ITEM_BYTES
    num_calls = max(len(one) for one in calls)
    chain = longest_chain(calls) if num_calls <= MAX_CALLS else num_calls
    measures = (
        _measure("bytes sent and received by the busiest rank", max(amounts), most, decides, unit="B"),
        _measure("longest chain of messages", chain, 2 * levels, decides),
    )
    wrong, idea = "", "budget"
    if any(one[0] == "recv" and one[2] < 0 for rank in calls for one in rank):
        wrong = "a recv names no source, so that nobody can tell what waits for what: give group_src."
    elif max(amounts) > most:
        wrong = (
            f"rank {amounts.index(max(amounts))} of {world_size} sent and received {max(amounts)} B; in a tree nobody "
            f"moves more than 2 x {levels} tensors = {most} B."
        )
    elif chain > 2 * levels:
        wrong, idea = (
            f"{chain} messages waited for each other in a row; a tree of {world_size} ranks takes at most "
            f"2 x {levels} = {2 * levels}.",
            "chain",
        )
    elif (shortage := _shortage([sent(one) for one in calls], case.inputs["size"])) and world_size > 1:
        wrong, idea = shortage, "unseen"
    if decides and wrong:
        return Finding(passed=False, message=wrong, idea=idea, measures=measures)
    return Finding(passed=True, measures=measures)


def _judge_crossover(case: Case, values: Sequence[Any]) -> Finding:
    for (alpha_s, beta_s_per_byte, world_size), value in zip(case.inputs["questions"], values, strict=True):
        wanted = crossover_bytes(alpha_s, beta_s_per_byte, world_size)
        if isinstance(value, float) and math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=1.0):
            continue
        got = f"{value:.0f} B" if isinstance(value, float) else _said(value)
        given = _link(alpha_s, beta_s_per_byte, world_size)
        message = f"crossover_bytes says {got} for {given}; ring and tree take equal time at {wanted:.0f} B."
        return Finding(
            passed=False,
            message=message,
            given=given,
            got=got,
            wanted=f"{wanted:.0f} B, within {TOLERANCE:.0%}",
            idea="crossover",
        )
    return Finding(passed=True)


def _judge_faster(case: Case, values: Sequence[Any]) -> Finding:
    for (num_bytes, alpha_s, beta_s_per_byte, world_size), value in zip(case.inputs["questions"], values, strict=True):
        levels = _levels(world_size)
        ring_s = 2 * (world_size - 1) * (alpha_s + num_bytes / world_size * beta_s_per_byte)
        tree_s = 2 * levels * (alpha_s + num_bytes * beta_s_per_byte)
        wanted = "ring" if ring_s < tree_s else "tree"
        if value == wanted:
            continue
        given = f"{num_bytes} B, {_link(alpha_s, beta_s_per_byte, world_size)}"
        message = (
            f"faster says {_said(value)} for {given}: the ring takes {_time(ring_s)}, the tree {_time(tree_s)}, so the "
            f"answer is {wanted}."
        )
        return Finding(passed=False, message=message, given=given, got=_said(value), wanted=wanted, idea="faster")
    return Finding(passed=True)


def _link(alpha_s: float, beta_s_per_byte: float, world_size: int) -> str:
    return f"alpha {alpha_s * 1e6:g} us, {1 / beta_s_per_byte / 1e9:g} GB/s, {world_size} ranks"


def _said(value: Any) -> str:
    return str(value["type"]) if isinstance(value, dict) else str(value)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} us" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"


TREE = Exercise(
    question="06.2",
    title="Tree all-reduce and the crossover",
    chapter=CHAPTER,
    answers=("tree_all_reduce", "crossover_bytes", "faster"),
    criteria=(
        Criterion(name="sum", points=1, text="the tree's sum on every rank, 2 and 4 ranks"),
        Criterion(name="any", points=2, text="any number of ranks, any size, any group"),
        Criterion(name="budget", points=2, text="at most 2 ceil(log2 N) steps, and as many tensors through a rank"),
        Criterion(name="crossover", points=3, text="the crossover within 10 %"),
        Criterion(name="faster", points=2, text="the faster algorithm for a size"),
    ),
    cases=_tree_cases,
    judge=_judge_tree,
    ideas=TREE_IDEAS,
)
