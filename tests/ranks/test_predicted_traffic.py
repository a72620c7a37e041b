"""What is said to be communicated is what ranks communicate."""

from collections import Counter
from typing import Any

import pytest

import labkit as lk
from labkit.spec import Layout, Model

pytestmark = pytest.mark.ranks

MODEL = Model(num_layers=4, d_model=32, num_heads=4, vocab_size=256, seq_len=16)
LAYOUTS = ("dp2 tp2 m2 b2", "tp2 pp2 m4", "dp2 pp2 zbv v2 m4", "tp2 pp2 interleaved v2 m4 bf16")


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_step_sends_what_was_predicted(ranks: Any, text: str) -> None:
    plan = lk.plan.build(MODEL, Layout.parse(text))
    step = lk.launch.train(ranks, plan, 2, progress=False).trace.of_step(1)
    for rank in range(plan.world_size):
        counted: Counter[tuple[str, str, int]] = Counter()
        for event in step.of_rank(rank).events:
            if event.kind in ("SEND_F", "SEND_B"):
                counted["pp", "send", event.num_bytes or 0] += 1
            elif event.group in ("tp", "dp"):
                counted[event.group, event.kind, event.num_bytes or 0] += 1
        predicted: Counter[tuple[str, str, int]] = Counter()
        for one in lk.predict.traffic(plan, rank):
            predicted[one.axis, one.kind, one.num_bytes] += one.num_calls
        for found in (counted, predicted):  # gradients go in buckets, whose number is torch's choice
            size = sum(key[2] * found.pop(key) for key in [key for key in found if key[0] == "dp"])
            found["dp", "all_reduce", size] += size > 0
        assert counted == predicted
        assert sum(predicted.values()) > 0
