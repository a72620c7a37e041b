"""Totals of a step on 16,384 ranks: predicted time and memory of a 405B layout, without an event.

    python -m benchmarks.totals [--pairs N]

Every round predicts a layout that nothing was predicted of before: it differs in sequence length, so that no cache
knows it. The first round also makes the order of the schedule. Seconds are this process's own: others do not count.
"""

import gc
import statistics
import sys
import time
from dataclasses import replace

import labkit as lk
from benchmarks.pairs import arguments, json_line, say

BAR_S = 5e-3
LAYOUTS = ("dp128 tp8 pp16 m16 bf16 zero1 sp", "dp128 tp8 pp16 m128 bf16 zero1 sp", "dp256 tp8 pp8 m64 bf16 zero3 sp")


def seconds(plan: "lk.plan.Plan", hardware: "lk.spec.Hardware") -> float:
    """Seconds until step time, bubble and the memory of the first and the last rank are there."""
    gc.collect()
    began = time.process_time()
    trace, memory = lk.predict.step(plan, hardware), lk.predict.memory(plan)
    found = trace.step_time_s, trace.bubble_fraction, memory[0].peak, memory[plan.world_size - 1].peak
    taken = time.process_time() - began
    assert all(value > 0 for value in found)
    return taken


def main() -> int:
    """Predict every layout in every round; 0 when the median of each keeps the bar."""
    options = arguments(__doc__, pairs=15)
    model, hardware = lk.spec.Model.preset("llama3-405b"), lk.spec.Hardware.preset("h100")
    small = lk.plan.build(lk.spec.Model.preset("tiny"), lk.spec.Layout.parse("dp2 pp2"))
    seconds(small, hardware)  # imports
    taken: dict[str, list[float]] = {text: [] for text in LAYOUTS}
    for number in range(options.pairs):
        shape = replace(model, seq_len=model.seq_len + 128 * number)
        for text in LAYOUTS:
            plan = lk.plan.build(shape, lk.spec.Layout.parse(text))
            taken[text].append(seconds(plan, hardware))
        say(
            f"  round {number + 1}/{options.pairs}: "
            + ", ".join(f"{times[-1] * 1e3:.2f} ms" for times in taken.values())
        )
    print(f"totals: {options.pairs} rounds, step and memory of llama3-405b, no two rounds alike")
    print(f"  {'layout':36}  {'first':>9}  {'median':>9}  bar")
    for text, times in taken.items():
        median = statistics.median(times)
        judged = f"<= {BAR_S * 1e3:g} ms: {'met' if median <= BAR_S else 'MISSED'}"
        print(f"  {text:36}  {times[0] * 1e3:6.2f} ms  {median * 1e3:6.2f} ms  {judged}")
    rows = {
        text: {"first_s": round(times[0], 6), "median_s": round(statistics.median(times), 6)}
        for text, times in taken.items()
    }
    met = all(row["median_s"] <= BAR_S for row in rows.values())
    json_line("totals", rounds=options.pairs, layouts=rows, bar_s=BAR_S, met=met)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
