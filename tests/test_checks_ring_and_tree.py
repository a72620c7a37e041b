"""The judge of chapter 06 knows the crossover, the longest chain of messages and its cases; no ranks are needed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import checks
from labkit.checks.reductions import longest_chain
from labkit.checks.ring_and_tree import crossover_bytes
from labkit.exercise import Observation, mark
from labkit.rank.trials import all_reduce

RING, TREE = checks.exercise("06.1"), checks.exercise("06.2")


def calls(*messages: tuple[int, int], num_ranks: int) -> list[list[tuple[str, int, int]]]:
    """What each rank calls for these messages, one after the other."""
    by_rank: list[list[tuple[str, int, int]]] = [[] for _ in range(num_ranks)]
    for source, target in messages:
        by_rank[source].append(("send", 4, target))
        by_rank[target].append(("recv", 4, source))
    return by_rank


@given(
    alpha_s=st.floats(1e-7, 1e-2),
    beta_s_per_byte=st.floats(1e-12, 1e-6),
    world_size=st.integers(min_value=2, max_value=10**5),
)
def test_ring_and_tree_take_equal_time_at_the_crossover(
    alpha_s: float, beta_s_per_byte: float, world_size: int
) -> None:
    size = crossover_bytes(alpha_s, beta_s_per_byte, world_size)
    ring_s = 2 * (world_size - 1) * (alpha_s + size / world_size * beta_s_per_byte)
    tree_s = 2 * math.ceil(math.log2(world_size)) * (alpha_s + size * beta_s_per_byte)
    assert ring_s == pytest.approx(tree_s)
    assert (size == 0) == (world_size <= 3)


@pytest.mark.parametrize(
    ("messages", "num_ranks", "depth"),
    [
        ([], 3, 0),
        ([(1, 0), (0, 1)], 2, 2),
        ([(1, 0), (3, 2), (2, 0), (0, 2), (0, 1), (2, 3)], 4, 4),  # a binomial tree
        ([(3, 2), (2, 1), (1, 0), (0, 1), (1, 2), (2, 3)], 4, 6),  # a chain
        ([(1, 0), (2, 0), (3, 0), (0, 1), (0, 2), (0, 3)], 4, 2),  # a star: short, and heavy for rank 0
    ],
)
def test_the_longest_chain_of_messages(messages: list[tuple[int, int]], num_ranks: int, depth: int) -> None:
    assert longest_chain(calls(*messages, num_ranks=num_ranks)) == depth


def test_receives_posted_before_the_sends_hold_nothing_up() -> None:
    exchange = [[("recv", 4, 1), ("send", 4, 1)], [("recv", 4, 0), ("send", 4, 0)]]
    assert longest_chain(exchange) == 1


def test_a_receive_that_nobody_answers_ends_the_count() -> None:
    assert longest_chain([[("recv", 4, 1)], []]) == 0


@pytest.mark.parametrize("exercise", [RING, TREE], ids=lambda one: one.question)
def test_visible_cases_come_first_and_never_change(exercise: checks.Exercise) -> None:
    first, second = exercise.cases(1), exercise.cases(2)
    visible = [case for case in first if not case.hidden]
    assert visible == [case for case in second if not case.hidden] == list(first[: len(visible)])
    assert [case for case in first if case.hidden] != [case for case in second if case.hidden]
    assert {len(case.members) for case in first if case.hidden} >= {2, 3, 4}
    assert len({case.name for case in first}) == len(first)
    assert {case.criterion for case in visible} == {one.name for one in exercise.criteria}
    assert exercise.max_score == 10


def test_results_that_no_trial_gives_fail_their_case() -> None:
    cases = RING.cases(1)[:1]
    for value in (None, {"result": {}}, {"result": {"type": "Tensor", "shape": [4], "dtype": "float32"}, "calls": []}):
        result = mark(RING, cases, [Observation(outcome="returned", values=(value, value))])
        assert (result.status, result.score) == ("wrong", 0)


@pytest.mark.parametrize("answer", [{"type": "nan"}, "many", -1e30, 0.0])
def test_a_crossover_that_is_no_number_or_far_off_is_wrong(answer: object) -> None:
    case = next(one for one in TREE.cases(1) if one.criterion == "crossover")
    finding = TREE.judge(case, ([answer] * len(case.inputs["questions"]),))
    assert not finding.passed
    assert "equal time at 1420561 B" in finding.message


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (torch.zeros(1).expand(10**9), {"shape": [10**9], "dtype": "float32"}),
        (torch.empty(5000, device="meta"), {"shape": [5000], "dtype": "float32"}),
        (torch.zeros(5000, dtype=torch.complex64), {"shape": [5000], "dtype": "complex64"}),
        (
            torch.nn.Parameter(torch.ones(2, device="cpu").repeat(2500)),
            {"blocks": [[4096.0, 904.0], [8390656, 409060]]},
        ),
    ],
)
def test_of_a_long_result_only_the_right_shape_is_looked_at(result: torch.Tensor, told: dict) -> None:
    plain = all_reduce._compact(result, 5000)
    assert plain.items() >= told.items()
    assert ("blocks" in plain) == ("blocks" in told)
    assert "values" not in plain


def test_a_tensor_without_numbers_is_told() -> None:
    case = next(one for one in RING.cases(3) if one.members == (0, 1))
    empty = {"result": {"type": "Tensor", "shape": [4], "dtype": "float32"}, "calls": []}
    (result,) = mark(RING, [case], [Observation(outcome="returned", values=(empty, empty))]).cases
    assert "returned a tensor without numbers to read" in result.message


@pytest.mark.parametrize("exercise", [RING, TREE])
def test_a_budget_stands_only_beside_numbers_that_it_decides(exercise: checks.Exercise) -> None:
    for case in exercise.cases(0)[:5]:
        size, count = case.inputs["size"], len(case.members)
        data = [[(i * 7 + rank * 13 + case.inputs["seed"]) % 19 - 9 for i in range(size)] for rank in range(count)]
        total = [sum(column) for column in zip(*data, strict=True)]
        result = {"type": "Tensor", "shape": [size], "dtype": "float32", "values": total}
        wasteful = [("send", 9999, 1), ("recv", 9999, 1)] * 9
        finding = exercise.judge(case, tuple({"result": result, "calls": wasteful} for _ in range(count)))
        assert finding.passed == (case.criterion != "budget")
        assert {one.budget is None for one in finding.measures} == {finding.passed}
