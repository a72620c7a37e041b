"""The live state of a 10M-parameter model under another layout: `launch.switch` beside stopping and starting the ranks.

    python -m benchmarks.switch [--pairs N]

A round goes through all layouts once, from each to the next. Each change is made twice, one right after the other: by
`launch.switch` on live ranks, and on other ranks by `ranks.stop()`, `cluster.start(4)` and building groups, modules and
optimizer of the same layout. Both end where the first step may run. Starting again is measured from below: it loads no
weights and computes no initial ones, so that the price of a checkpoint is not in it. What counts is the median over
rounds of switch / restart. The first change to DeepSpeed in a process also imports it, which starting again does each
time: from two rounds on the median does not show that, so it has a line of its own, without a bar.
"""

# ruff: noqa: PLC0415  (functions bring their imports along to the ranks)

import statistics
import sys
import time

import labkit as lk
from benchmarks.pairs import arguments, json_line, say

MODEL = lk.spec.Model(num_layers=8, d_model=320, num_heads=8, vocab_size=256, seq_len=64)
BAR = 0.2
BAR_HEAVY = 0.35
"""ZeRO-3 and offload."""
ROUNDS = 4
LAYOUTS = (
    "dp4 b2",
    "tp2 pp2 m4 b2",
    "dp4 zero1 torch b2",
    "pp4 m4 b2",
    "dp4 zero3 torch b2",
    "tp4 b8",
    "dp2 pp2 zero2 m4 b1",
    "dp2 tp2 zero3 b4",
    "pp2 zbv v2 m4 b2",
    "dp2 tp2 b4",
    "dp1 b8",
    "dp4 zero1 b2",
    "dp4 zero3 b2",
    "dp4 zero2 offload:optimizer b2",
)


def plan_of(text: str) -> lk.plan.Plan:
    return lk.plan.build(MODEL, lk.spec.Layout.parse(text))


def build(plan):
    """On a rank: groups, modules and optimizer of a layout."""
    from labkit.rank import mesh, training
    from labkit.spec import Training

    own = mesh.of(plan)
    return own is not None and training.build(plan, Training(num_steps=1), own, initialised=False).step


def restarted(ranks: "lk.cluster.Ranks", plan: "lk.plan.Plan") -> tuple["lk.cluster.Ranks", float]:
    """New ranks in place of these, and the seconds until they could train."""
    began = time.perf_counter()
    ranks.stop()
    new = lk.cluster.start(4, backend="gloo")
    try:
        new.run(build, plan)
    except BaseException:
        new.stop()
        raise
    return new, time.perf_counter() - began


def main() -> int:
    """Go round; 0 when every change met its bar."""
    options = arguments(__doc__, pairs=ROUNDS)
    changes = list(zip(LAYOUTS, (*LAYOUTS[1:], LAYOUTS[0]), strict=True))
    seconds: dict[tuple[str, str], list[tuple[lk.launch.Switch, float]]] = {change: [] for change in changes}
    other = lk.cluster.start(4, backend="gloo")
    try:
        with lk.cluster.start(4, backend="gloo") as ranks:
            lk.launch.train(ranks, plan_of(LAYOUTS[0]), 1, progress=False)
            for number in range(options.pairs):
                for change in changes:
                    done = lk.launch.switch(ranks, plan_of(change[1]), progress=False)
                    other, restart_s = restarted(other, plan_of(change[1]))
                    seconds[change].append((done, restart_s))
                    lk.launch.train(ranks, plan_of(change[1]), 1, start="live", trace=False, progress=False)
                slowest = max(pairs[-1][0].seconds / pairs[-1][1] for pairs in seconds.values())
                say(f"  round {number + 1}/{options.pairs}: slowest {slowest:.3f} of a restart")
    finally:
        other.stop()
    return 0 if report(seconds, options.pairs) else 1


def report(seconds: dict[tuple[str, str], list[tuple["lk.launch.Switch", float]]], rounds: int) -> bool:
    """Print the table and the JSON line; whether every bar was met."""
    print(f"switch: {rounds} rounds, {MODEL.num_parameters / 1e6:.1f}M parameters with AdamW, four ranks")
    print(f"  {'from':20} {'to':20} {'MB':>6} {'switch':>7} {'build':>6} {'move':>6} {'restart':>8}  ratio  bar")
    rows, met = {}, True
    for (before, after), pairs in seconds.items():
        bar = BAR_HEAVY if "zero3" in before + after or "offload" in before + after else BAR
        ratio = statistics.median(done.seconds / restart_s for done, restart_s in pairs)
        each = [
            statistics.median(getattr(done, name) for done, _ in pairs) for name in ("seconds", "build_s", "move_s")
        ]
        restart_s = statistics.median(restart_s for _, restart_s in pairs)
        num_bytes = pairs[0][0].num_bytes
        print(
            f"  {before:20} {after:20} {num_bytes / 1e6:6.1f} {each[0]:7.3f} {each[1]:6.3f} {each[2]:6.3f} "
            f"{restart_s:8.3f}  {ratio:5.3f}  <= {bar:g}: {'met' if ratio <= bar else 'MISSED'}"
        )
        rows[f"{before} -> {after}"] = {"ratio": round(ratio, 4), "switch_s": round(each[0], 4), "bar": bar}
        met = met and ratio <= bar
    first = next(pairs[0] for pairs in seconds.values() if pairs[0][0].after.engine == "deepspeed")
    import_ratio = first[0].seconds / first[1]
    print(f"  the first change to DeepSpeed, which imports it: {import_ratio:.3f} of a restart")
    json_line("switch", rounds=rounds, changes=rows, first_to_deepspeed=round(import_ratio, 4), met=met)
    return met


if __name__ == "__main__":
    sys.exit(main())
