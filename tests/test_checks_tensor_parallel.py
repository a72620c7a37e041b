"""What the judge of the split linear layers says, without ranks: by hand what a trial would bring."""

import numpy as np
import pytest

from labkit.checks.tensor_parallel import COLUMN_AND_ROW
from labkit.exercise import Case

SEEDS = range(20)


def plain(values):
    array = np.asarray(values, dtype=float)
    return {"type": "Tensor", "shape": list(array.shape), "dtype": "float32", "values": array.flatten().tolist()}


def told(output, gradients, forward=(), backward=()):
    gradients = {name: plain(value) for name, value in gradients.items()}
    return {
        "output": plain(output),
        "gradients": gradients,
        "tracked": True,
        "forward": list(forward),
        "backward": list(backward),
    }


def one_case(criterion: str) -> Case:
    return next(case for case in COLUMN_AND_ROW.cases(0) if case.criterion == criterion)


def right_row(case: Case):
    """What each member of a row-parallel layer brings, computed entry by entry."""
    x, weight, bias, upstream = (np.array(case.inputs[name]) for name in ("x", "weight", "bias", "upstream"))
    size = x.shape[1] // len(case.members)
    output = [[sum(a * b for a, b in zip(row, line, strict=True)) for line in weight] for row in x] + bias
    for member in range(len(case.members)):
        part = slice(member * size, (member + 1) * size)
        gradients = {"x": upstream @ weight[:, part], "weight": upstream.T @ x[:, part], "bias": upstream.sum(0)}
        yield told(output, gradients)


def test_criteria_make_ten_points_and_each_has_visible_and_hidden_cases() -> None:
    assert COLUMN_AND_ROW.max_score == 10
    cases = COLUMN_AND_ROW.cases(0)
    for criterion in COLUMN_AND_ROW.criteria:
        assert {case.hidden for case in cases if case.criterion == criterion.name} == {False, True}


def test_every_seed_draws_sizes_that_divide_and_catch_a_transposed_matrix() -> None:
    for case in (case for seed in SEEDS for case in COLUMN_AND_ROW.cases(seed)):
        inputs, size = case.inputs, len(case.members)
        assert set(case.members) <= set(range(4))
        if "weight" in inputs:
            d_out, d_in = np.shape(inputs["weight"])
            assert len({d_out, d_in, len(inputs["x"])}) == 3
            assert (d_out if case.trial.endswith("column") else d_in) % size == 0
        else:
            assert len(inputs["up"]) % size == 0
            assert not inputs["residual"] or len(inputs["down"]) == len(inputs["up"][0])
    assert {len(case.members) for case in COLUMN_AND_ROW.cases(0) if case.hidden} == {2, 3, 4}


def test_another_seed_changes_only_what_is_hidden() -> None:
    first, second = COLUMN_AND_ROW.cases(1), COLUMN_AND_ROW.cases(2)
    assert [case for case in first if not case.hidden] == [case for case in second if not case.hidden]
    assert [case for case in first if case.hidden] != [case for case in second if case.hidden]


def test_the_row_parallel_judge_agrees_with_a_layer_computed_entry_by_entry() -> None:
    case = one_case("row backward")
    assert COLUMN_AND_ROW.judge(case, tuple(right_row(case))).passed


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("bias", lambda array: array * 2, "2 times as large"),
        ("x", lambda array: array + 1, "upstream gradient times weight"),
        ("weight", lambda array: array.T, "has shape"),
        ("x", lambda array: array * np.nan, "is nan on rank 1 (member 1 of 2)"),
    ],
)
def test_a_wrong_gradient_of_one_member_is_found_and_explained(name, change, said) -> None:
    case = one_case("row backward")
    values = list(right_row(case))
    gradient = values[1]["gradients"][name]
    array = np.array(gradient["values"]).reshape(gradient["shape"])
    values[1]["gradients"][name] = plain(change(array))
    finding = COLUMN_AND_ROW.judge(case, tuple(values))
    assert not finding.passed
    assert said in finding.message
    assert "rank 1 (member 1 of 2)" in finding.message
    assert finding.idea in COLUMN_AND_ROW.ideas


@pytest.mark.parametrize(
    ("forward", "backward", "passed", "said"),
    [
        ([["all_reduce", 72, -1]], [["all_reduce", 60, -1]], True, ""),
        ([["all_reduce", 72, -1]], [], False, "0 all_reduce backward"),
        ([["all_gather", 96, -1], ["all_reduce", 72, -1]], [["all_reduce", 60, -1]], False, "1 all_gather and 1 all_"),
        ([["all_reduce", 72, -1]], [["all_reduce", 60, -1]] * 2, False, "2 all_reduce backward"),
        ([["all_reduce", 144, -1]], [["all_reduce", 60, -1]], False, "144 B"),
    ],
)
def test_traffic_is_one_all_reduce_each_way_and_no_more_bytes_than_needed(forward, backward, passed, said) -> None:
    case = one_case("one all-reduce")
    finding = COLUMN_AND_ROW.judge(case, (told([], {}, forward, backward),) * 4)
    assert finding.passed is passed
    assert said in finding.message
    assert [measure.budget for measure in finding.measures] == [1, 72, 1, 60]
