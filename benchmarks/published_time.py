"""Predicted step times beside published ones: one constant for each device and software, fitted to the own tables."""

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from benchmarks import published_collectives, published_pipelines
from benchmarks.published_case import Case, Stack, constants, crossed, efficiency, own_efficiency
from benchmarks.published_row import TABLES, Row, error_pct
from benchmarks.published_runs import bloom, cases, cloud, mlperf, vtrain
from benchmarks.published_throughput import (
    foundry,
    internevo,
    korthikanti,
    megascale,
    megatron_h100,
    nanotron,
    narayanan,
    nemo,
    zero_bubble,
)

RUNS: dict[str, Callable[[dict[str, str]], Case | None]] = {
    "vtrain_multi_node": vtrain,
    "vtrain_single_node": vtrain,
    "throughput_memory_bigscience_bloom": bloom,
    "throughput_mlperf": mlperf,
    "throughput_dgxc_weak_scaling": cloud,
    "throughput_megatron_sc21_table1": narayanan,
    "korthikanti_iteration_times": korthikanti,
    "throughput_megascale_table2": megascale,
    "throughput_megatron_h100_readme": megatron_h100,
    "zero_bubble_throughput_memory": zero_bubble,
    "throughput_llm_foundry": foundry,
    "throughput_megatron_bridge_nemo": nemo,
    "throughput_memory_nanotron_playbook": nanotron,
    "throughput_internevo_7b": internevo,
}


def score(tables_dir: Path) -> list[Row]:
    """Step times, bubbles and collectives of the tables in a folder.

    Of the project's own tables also what the error is where half of each stack's rows, in turns, fit the constant and
    the other half is predicted. Rows of other folders are never fitted to.
    """
    found = []
    for table, make in RUNS.items():
        chosen = [case for _, case in cases(tables_dir, table, make)]
        if not chosen:
            continue
        known = _fitted(table, make)
        measured = [case.step_s for case in chosen]
        predicted = [case.seconds(efficiency(case, known)) for case in chosen]
        baseline = _constant_efficiency(chosen)
        found.append(Row(table, "step time", error_pct(predicted, measured), baseline, len(chosen)))
        if tables_dir == TABLES:
            halves = crossed(chosen, {id(case): own_efficiency(case) for case in chosen})
            target = "step time, constants of the other half"
            found.append(Row(table, target, error_pct(halves, measured), baseline, len(chosen)))
    return found + published_pipelines.score(tables_dir) + published_collectives.score(tables_dir)


@cache
def _fitted(table: str, make: Callable[[dict[str, str]], Case | None]) -> dict[Stack, float]:
    """The constants of a table's stacks, from the project's copy of it."""
    own = [case for _, case in cases(TABLES, table, make)]
    return constants(own, {id(case): own_efficiency(case) for case in own})


def _constant_efficiency(chosen: Sequence[Case]) -> float:
    """The baseline: every run of a stack reaches the stack's median share of the peak."""
    shares: dict[Stack, list[float]] = {}
    for case in chosen:
        shares.setdefault(case.stack, []).append(case.flops / case.step_s)
    guesses = [case.flops / statistics.median(shares[case.stack]) for case in chosen]
    return error_pct(guesses, [case.step_s for case in chosen])
