"""What a learner may hand to `start` and `Ranks`: every refusal says value, rule and fix."""

import numpy as np
import pytest

import labkit as lk
from labkit.cluster.checks import check_choice, check_count, check_rank, check_ranks, check_timeout
from labkit.errors import PlanError


class Unprintable:
    """Its repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize("value", [True, 2.5, "4", None, [], float("nan"), Unprintable(), np.bool_(True)])
def test_a_count_of_the_wrong_type_is_refused(value: object) -> None:
    with pytest.raises(PlanError, match=r"num_ranks=.* is of type .*: a whole number from 1 to 8 is needed"):
        check_count("num_ranks", value, 1, 8)


@pytest.mark.parametrize(
    ("value", "nearest"), [(0, 1), (-1, 1), (9, 8), (10**9, 8), pytest.param(10**5000, 8, id="huge"), (np.int64(9), 8)]
)
def test_a_count_out_of_bounds_names_the_nearest(value: int, nearest: int) -> None:
    with pytest.raises(PlanError, match=rf"is outside 1 to 8. Use num_ranks={nearest}\."):
        check_count("num_ranks", value, 1, 8)


def test_counts_within_bounds_come_back_as_int() -> None:
    assert [type(check_count("n", value, 1, 8)) for value in (1, 8, np.int32(3))] == [int, int, int]


@pytest.mark.parametrize("value", ["x", None, [], True, 1j])
def test_a_time_of_the_wrong_type_is_refused(value: object) -> None:
    with pytest.raises(PlanError, match=r"timeout_s=.* is of type"):
        check_timeout(value)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), -float("inf"), 10**400, 8 * 24 * 3600])
def test_a_time_out_of_bounds_is_refused(value: float) -> None:
    with pytest.raises(PlanError, match=r"is not above 0 and at most 604800 s. Use for instance timeout_s=60"):
        check_timeout(value)


def test_times_come_back_as_float() -> None:
    assert [check_timeout(value) for value in (1, 0.5, np.float32(0.25))] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize("value", [1, "0", b"0", 1.0, object(), float("nan")])
def test_ranks_must_be_a_list(value: object) -> None:
    with pytest.raises(PlanError, match=r"a list of ranks is needed, such as ranks=\[0, 1\]"):
        check_ranks(value, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [[True], [1.0], ["0"], [None], {"a": 1}])
def test_ranks_must_be_whole_numbers(value: object) -> None:
    with pytest.raises(PlanError, match="a whole number from 0 to 3 is needed"):
        check_ranks(value, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([9], "rank=9 is outside 0 to 3. Use rank=3"),
        ([-1], "rank=-1 is outside 0 to 3. Use rank=0"),
        ([0, 2, 0], "ranks=[0, 2, 0] names 2 ranks in 3 places: each once. Use ranks=[0, 2]"),
        ([], "names no rank"),
        (range(0), "names no rank"),
    ],
)
def test_impossible_ranks_are_refused(value: list[int], text: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_ranks(value, 4)
    assert text in str(caught.value)


def test_ranks_keep_their_order() -> None:
    assert check_ranks(None, 3) == [0, 1, 2]
    assert check_ranks((2, 0), 3) == [2, 0]
    assert check_ranks(np.array([1, 2]), 3) == [1, 2]
    assert check_ranks((rank for rank in (2, 1)), 3) == [2, 1]
    assert check_rank(2, 3) == 2


@pytest.mark.parametrize("value", ["mpi", 5, [], Unprintable(), np.array([1, 2])])
def test_a_choice_names_the_others(value: object) -> None:
    with pytest.raises(PlanError, match="is not one of None, 'nccl', 'gloo'"):
        check_choice("backend", value, (None, "nccl", "gloo"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_ranks": 0},
        {"num_ranks": 10**9},
        {"num_ranks": "4"},
        {"spares": -1},
        {"spares": None},
        {"backend": "mpi"},
        {"backend": []},
        {"launcher": "pbs"},
        {"launcher": 1},
        {"start_method": "forkserver"},
        {"timeout_s": 0},
        {"timeout_s": "x"},
    ],
    ids=str,
)
def test_start_refuses_before_anything_starts(arguments: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=f"{next(iter(arguments))}="):
        lk.cluster.start(**arguments)  # type: ignore[arg-type]
