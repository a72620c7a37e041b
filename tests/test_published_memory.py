"""Predicted memory beside published tables: the bars, and rows that are new or say too little."""

import csv

import pytest

from benchmarks import published_memory
from benchmarks.published_row import TABLES, read
from benchmarks.published_stacks import CALIBRATED


@pytest.fixture(scope="module")
def rows():
    return {(row.table, row.target): row for row in published_memory.score()}


def test_every_table_meets_its_bar_and_beats_a_constant(rows):
    assert set(published_memory.BARS) <= set(rows)
    for key, bar in published_memory.BARS.items():
        assert rows[key].error_pct <= bar, key
        assert rows[key].error_pct < rows[key].baseline_pct, key


def test_peaks_are_predicted_for_every_row_that_trains_whole_models(rows):
    assert rows["throughput_memory_bigscience_bloom", published_memory.PEAK].rows == 52
    assert rows["memory_measured", published_memory.PEAK].rows == 150
    assert len({stack for stack, _ in CALIBRATED}) <= len(published_memory.STACKS)


def write(folder, table, rows):
    with (folder / f"{table}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_a_folder_with_other_rows_is_scored_and_what_says_too_little_is_left_out(tmp_path):
    assert published_memory.score(tmp_path) == []
    known = read(TABLES, "zero_bubble_throughput_memory")[0]
    other = known | {"layers": "30", "hidden": "3072", "heads": "24", "pp": "4", "peak_mem_gb": "70"}
    wrong = [
        known | {"hidden": ""},
        known | {"layers": "many"},
        known | {"schedule": "ZB-3p"},
        known | {"heads": "7"},
        known | {"pp": "?"},
    ]
    write(tmp_path, "zero_bubble_throughput_memory", [known, other, *wrong, known | {"peak_mem_gb": ""}])
    (row,) = published_memory.score(tmp_path)
    assert row.rows == 2
    state = read(TABLES, "zero_table1_state_memory")[0]
    write(
        tmp_path,
        "zero_table1_state_memory",
        [state | {"model": "13B", "dp": "16", "model_state_gb_per_device": "61.75"}],
    )
    assert published_memory.score(tmp_path)[0].error_pct == pytest.approx(0)


def test_a_prediction_does_not_depend_on_the_order_of_columns():
    row = read(TABLES, "throughput_memory_torchtitan")[0] | {"from_table": "throughput_memory_torchtitan"}
    turned = dict(reversed(row.items()))
    assert published_memory._peak(row, "mem_gib") == published_memory._peak(turned, "mem_gib")
