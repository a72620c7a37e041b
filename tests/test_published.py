"""The benchmark of predictions against published tables: what it scores, and on whose rows."""

import csv
from dataclasses import replace

import pytest

from benchmarks import published_collectives, published_pipelines
from benchmarks.published_case import constants, crossed, efficiency, own_efficiency
from benchmarks.published_row import TABLES, constant_pct, error_pct, read
from benchmarks.published_runs import NEW, cases, cloud, mlperf, vtrain
from benchmarks.published_time import score
from labkit import plan, predict
from labkit.spec import Layout


@pytest.fixture(scope="module")
def runs():
    return [case for _, case in cases(TABLES, "vtrain_multi_node", vtrain)]


def test_a_run_that_a_layout_can_say_takes_what_the_step_takes(runs):
    case = next(one for one in runs if one.pp == 8 and one.dp == 8 and one.tp == 8)
    layout = Layout.parse(f"dp8 tp8 pp8 m{case.num_microbatches} b{case.microbatch_size} bf16 recompute:full")
    hardware = replace(case.hardware, product_efficiency=0.8)
    step = predict.step(plan.build(case.model, layout), hardware, software=case.software)
    assert case.seconds(0.8) == pytest.approx(step.step_time_s, rel=0.02)


def test_one_constant_fits_a_stack_and_holds_for_its_other_half(runs):
    own = {id(case): own_efficiency(case) for case in runs}
    known = constants(runs, own)
    assert len({efficiency(case, known) for case in runs}) == 1
    measured = [case.step_s for case in runs]
    assert error_pct([case.seconds(efficiency(case, known)) for case in runs], measured) < 12
    assert error_pct(crossed(runs, own), measured) < 12
    for case in runs[::20]:
        assert case.seconds(own[id(case)]) == pytest.approx(case.step_s, rel=0.02)


def test_an_unknown_stack_has_its_device_s_constant_or_the_data_sheet_s(runs):
    known = {("A100",): 0.7}
    assert efficiency(replace(runs[0], stack=("A100", "another")), known) == 0.7
    assert efficiency(replace(runs[0], stack=("H100",)), known) == runs[0].hardware.product_efficiency


def test_every_run_of_the_recipes_is_read():
    assert len(cases(TABLES, "throughput_dgxc_weak_scaling", cloud)) == 105
    found = cases(TABLES, "throughput_mlperf", mlperf)
    assert {case.cp for _, case in found} == {1, 2}
    assert all(case.software == NEW and case.step_s > 0 for _, case in found)


def test_bubbles_and_collectives_meet_their_bars():
    rates, order = published_pipelines.score(TABLES)
    assert rates.error_pct < 15 < rates.baseline_pct
    assert order.error_pct == 0
    medians = [row for row in published_collectives.score(TABLES) if "median" in row.target]
    assert len(medians) == 2
    assert all(row.error_pct < 15 for row in medians)


def test_rows_of_another_folder_are_predicted_not_fitted(tmp_path):
    rows = read(TABLES, "vtrain_multi_node")
    chosen = [row | {"iter_ms": str(2 * float(row["iter_ms"]))} for row in rows[::10]]
    chosen += [rows[0] | {"iter_ms": ""}, rows[1] | {"mbs": "0"}]  # they say too little
    with (tmp_path / "vtrain_multi_node.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(chosen)
    (row,) = score(tmp_path)
    assert (row.table, row.target, row.rows) == ("vtrain_multi_node", "step time", len(chosen) - 2)
    assert 40 < row.error_pct < 60  # every run is half as long as it is said to be
    assert score(tmp_path / "none") == []


def test_errors_are_of_the_measured():
    assert error_pct([2.0, 1.0], [1.0, 1.0]) == 50
    assert constant_pct([1.0, 1.0, 2.0], ["a", "a", "b"]) == 0
