"""Bubbles of pipeline schedules beside published ones: rates that were measured, and theory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.published_models import gpt
from benchmarks.published_row import Row, constant_pct, error_pct, positive, read, tried
from labkit.predict import Reach, Software, collective_time
from labkit.predict.costs import layer, seconds
from labkit.predict.execution import totals
from labkit.spec import Hardware
from labkit.spec.checks import whole

TABLE = "zero_bubble_bubble_rates"
A100 = Hardware.preset("a100-80")
MODELS = {
    "1.5B": (22, 2304, 24, 6),
    "6.2B": (30, 4096, 32, 3),
    "14.6B": (46, 5120, 40, 1),
    "28.3B": (62, 6144, 48, 1),
}
"""Layers, width, heads and micro-batch size (Qi et al. 2023, arXiv 2401.10241, table 3); sequences of 1,024 tokens. The
first and the last stage hold a layer less, for embedding and head."""

SOFTWARE = replace(Software.preset("megatron-2021"), stream_bytes=2)
SEND_S = 0.3e-3
"""What a message between stages takes beyond its bytes on the paper's nodes: the one constant of this stack, fitted to
the 1F1B rows of two models."""


class Unit(NamedTuple):
    """Seconds of a rank's part of the model for one micro-batch, and of a message."""

    forward_s: float
    inputs_s: float
    weights_s: float
    send_s: float
    num_layers: int

    @property
    def whole_s(self) -> float:
        return self.forward_s + self.inputs_s + self.weights_s


def unit(name: str, pp: int) -> Unit:
    """What a stage takes; all stages alike, as the paper has it.

    Raises:
        PlanError: more stages than layers and ends.
    """
    num_layers, width, heads, size = MODELS[name]
    pp = whole("pp", pp, maximum=num_layers + 2)
    tokens, each = size * 1024, (num_layers + 2) // pp
    inner = layer(gpt(num_layers, width, heads, 1024), tokens, SOFTWARE)
    times = [each * seconds(work, A100, SOFTWARE, "bf16", Reach(1, 1)) for work in inner[:3]]
    send_s = collective_time("send", 2 * tokens * width, Reach(2, 1), A100) + SEND_S
    return Unit(times[0], times[1], times[2], send_s, each)


def executed(schedule: str, pp: int, m: int, v: int, one: Unit) -> float:
    """The bubble of a schedule of this lab, from its execution with messages."""
    stages = pp * v
    durations = {"F": [one.forward_s / v] * stages, "I": [one.inputs_s / v] * stages, "W": [one.weights_s / v] * stages}
    return totals(schedule, pp, m, v, durations, [one.send_s] * (stages - 1)).bubble_fraction


def bubble_rate(schedule: str, name: str, pp: int, m: int) -> float:
    """The predicted rate: idle over total of the stage that takes longest.

    1F1B and its interleaved form are executed. The zero-bubble schedules, which this lab does not have in this form,
    follow the paper's table 1, with the messages on their critical path: (p - 1) (F + I - W) for ZB-H1, and for ZB-1p,
    which has its memory; (p - 1) (F + I - 2 W) for ZB-H2; none for ZB-2p, if the second forwards bridge the round trip.
    """
    one = unit(name, pp)
    if schedule == "1F1B":
        return executed("1f1b", pp, m, 1, one)
    if schedule == "1F1B-I":
        return executed("interleaved", pp, m, one.num_layers, one)
    both_s = one.forward_s + one.inputs_s
    idle_s = {
        "ZB-H1": both_s - one.weights_s + 4 * one.send_s,
        "ZB-1p": both_s - one.weights_s + 4 * one.send_s,
        "ZB-H2": both_s - 2 * one.weights_s + 2 * one.send_s,
        "ZB-2p": 2 * one.send_s,
    }[schedule] * (pp - 1)
    return idle_s / (idle_s + m * one.whole_s)


def score(tables_dir: Path) -> list[Row]:
    """The rates, their order within a model, and what theory says of equal stages."""
    tried_rows = [(row, tried(_rates, row)) for row in read(tables_dir, TABLE)]
    rows = [(row, rates) for row, rates in tried_rows if rates is not None]
    if not rows:
        return []
    predicted, measured = zip(*(rates for _, rates in rows), strict=True)
    baseline = constant_pct(measured, [row["schedule"] for row, _ in rows])
    keys = [(row["model"], row["microbatches"]) for row, _ in rows]
    return [
        Row(TABLE, "bubble_rate", error_pct(predicted, measured), baseline, len(rows)),
        *_order(keys, predicted, measured),
    ]


def _rates(row: dict[str, str]) -> tuple[float, float]:
    """Predicted and measured."""
    guess = bubble_rate(row["schedule"], row["model"], int(row["pp"]), whole("microbatches", int(row["microbatches"])))
    return guess, positive(row["bubble_rate"])


def _order(keys: Sequence[tuple[str, str]], predicted: Sequence[float], measured: Sequence[float]) -> list[Row]:
    """Of pairs of schedules whose rates on one model are more than 5 % apart, how many come out the wrong way round."""
    wrong = pairs = 0
    for one, key in enumerate(keys):
        for two in range(one):
            if keys[two] == key and abs(measured[one] / measured[two] - 1) > 0.05:
                pairs += 1
                wrong += (predicted[one] < predicted[two]) != (measured[one] < measured[two])
    return [Row(TABLE, "pairs in the wrong order", 100 * wrong / pairs, 50.0, pairs)] if pairs else []
