"""The judge of exercise 04.1, on values that no rank had to give."""

import pytest

from labkit.checks.pipeline import ONE_F_ONE_B
from labkit.exercise import Observation, mark
from labkit.schedule import gpipe, one_f_one_b

CASES = ONE_F_ONE_B.cases(5)


def told(builder, sizes):
    return [{"lists": [[str(one) for one in line] for line in builder(*size)]} for size in sizes]


def emitted(case, builder=one_f_one_b):
    return (told(builder, case.inputs["sizes"]),)


def test_ten_points_and_visible_cases_that_no_seed_changes():
    assert ONE_F_ONE_B.max_score == 10
    hidden = [case.hidden for case in CASES]
    assert hidden == sorted(hidden)
    assert {case.criterion for case in CASES} == {one.name for one in ONE_F_ONE_B.criteria}
    for other in (6, 7):
        again = ONE_F_ONE_B.cases(other)
        assert [case for case in again if not case.hidden] == [case for case in CASES if not case.hidden]
        assert again != CASES


@pytest.mark.parametrize("case", [case for case in CASES if "sizes" in case.inputs], ids=lambda case: case.name)
def test_1f1b_passes_and_gpipe_holds_too_many(case):
    assert ONE_F_ONE_B.judge(case, emitted(case)).passed
    finding = ONE_F_ONE_B.judge(case, emitted(case, gpipe))
    assert finding.passed == (case.criterion in ("complete", "time"))
    if not finding.passed:
        assert (finding.idea, finding.measures[0].kept) == ("memory", False)


@pytest.mark.parametrize(
    ("lists", "idea", "message"),
    [
        ([["0F0", "0B0"]], "complete", "2 stages, 2 micro-batches: 1 list for num_stages=2"),
        ([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1I1", "1W1", "1F1"]], "complete", "waits at 1I1 for 1F1"),
        ([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1I1", "1W1"]], "form", "list 1 holds 1I1: 1F1B is"),
        ([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], "deadlock", "no rank can go on"),
        ([["0F0", "0F1", "0B0", "0B1"], ["1F1", "1B1", "1F0", "1B0"]], "order", "rank 1 runs 1F1 before 1F0"),
    ],
)
def test_what_is_no_schedule_is_named(lists, idea, message):
    finding = ONE_F_ONE_B.judge(CASES[0], ([{"lists": lists}, *told(one_f_one_b, CASES[0].inputs["sizes"][1:])],))
    assert not finding.passed
    assert finding.idea == idea
    assert message in finding.message


@pytest.mark.parametrize("change", [{"ran": []}, {"gradient": [0.0] * 9}, {"loss": -1.0}, {"lists": []}])
def test_a_run_that_did_something_else_is_seen(change):
    case = next(case for case in CASES if case.criterion == "run")
    (plain,) = told(one_f_one_b, [[2, 3]])
    # What torch gave for the trial's numbers, seed 1.
    first = plain | {"ran": plain["lists"][0], "most_held": 2, "loss": 0.0}
    last = plain | {"ran": plain["lists"][1], "most_held": 1, "loss": 2407.0}
    first["gradient"] = [58.0, 418.0, -622.0, -132.0, 264.0, 156.0, 338.0, -1210.0, 154.0]
    last["gradient"] = [128.0, 18.0, 138.0, -780.0, -906.0, 788.0, 212.0, 390.0, -522.0]
    assert ONE_F_ONE_B.judge(case, (first, last)).passed
    changed = {"lists": change["lists"]} if "lists" in change else change
    assert not ONE_F_ONE_B.judge(case, (first | changed, last | change)).passed


def test_values_that_no_trial_gives_are_wrong_and_no_more():
    seen = [Observation(outcome="returned", values=("x",) * len(case.members)) for case in CASES]
    assert (mark(ONE_F_ONE_B, CASES, seen).status, mark(ONE_F_ONE_B, CASES, seen).score) == ("wrong", 0)
