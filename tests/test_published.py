"""The benchmark of predictions against published tables: what it scores, and on whose rows."""

import csv
import math
import pathlib
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks import published_collectives, published_memory, published_pipelines
from benchmarks.published_case import constants, crossed, efficiency, own_efficiency
from benchmarks.published_row import TABLES, constant_pct, error_pct, read
from benchmarks.published_runs import NEW, cases, cloud, mlperf, vtrain
from benchmarks.published_time import score
from labkit import plan, predict
from labkit.errors import PlanError
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


WRONG = ["", " ", "NA", "many", "nan", "inf", "-1", "0", "0.5", "1e-320", "1e400", "1000000000000", "9" * 30]


def write(folder, table, rows):
    with (folder / f"{table}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("table", sorted(path.stem for path in TABLES.glob("*.csv")))
def test_no_row_breaks_a_score(table, tmp_path):
    good = read(TABLES, table)[0]
    write(tmp_path, table, [good, *({**good, column: wrong} for column in good for wrong in WRONG)])
    check(tmp_path)
    short = (tmp_path / f"{table}.csv").read_text(encoding="utf-8").splitlines()[0]
    (tmp_path / f"{table}.csv").write_text(f"\ufeff{short}\n{table}\n,,\n{',' * 99}\n", encoding="utf-8")
    check(tmp_path)
    for missing in good:
        write(tmp_path, table, [{column: text for column, text in good.items() if column != missing}])
        check(tmp_path)


def check(folder):
    for row in score(folder) + published_memory.score(folder):
        assert row.rows > 0
        assert math.isfinite(row.error_pct)
        assert math.isfinite(row.baseline_pct)


def test_what_cannot_be_read_is_said(tmp_path):
    (tmp_path / "vtrain_multi_node.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"vtrain_multi_node\.csv cannot be read .*UTF-8"):
        score(tmp_path)
    assert "cannot be read" in benchmark(tmp_path, 2).stderr
    (tmp_path / "vtrain_multi_node.csv").write_text("", encoding="utf-8")
    assert "no table there has rows and a known name" in benchmark(tmp_path, 2).stderr
    write(tmp_path, "vtrain_multi_node", [{"iter_ms": "100"}])
    assert '"unscored": ["vtrain_multi_node"], "met": false' in benchmark(tmp_path, 1).stdout


ROOT = pathlib.Path(__file__).resolve().parent.parent


def benchmark(folder, status):
    command = [sys.executable, "-m", "benchmarks.published", "--tables", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert done.returncode == status
    return done
