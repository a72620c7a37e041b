"""A training step on live ranks, tracing off and on, against a hand-written torchrun script of the same layout.

    python -m benchmarks.train_step [dp4|tp4|pp4|dp2_tp2|zero1|zero3|fsdp2 ...] [--pairs N]

Model, batch, optimizer and clipping are the same (`train_scripts/sizes.py`); both sides give loss and global gradient
norm in each step. A job's number is the median time between the beginnings of two steps, so that what labkit reports
to the notebook counts as part of the step.
"""

import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import labkit as lk
from benchmarks.children import Child
from benchmarks.pairs import arguments, compare, report, say
from benchmarks.train_scripts.sizes import CLIP_NORM, LAYOUTS, LEARNING_RATE, MODEL, WARM_UP_STEPS
from labkit import compiled

BAR = 1.03
NUM_STEPS = 15
LIMIT_S = 180.0
SCRIPTS = Path(__file__).resolve().parent / "train_scripts"


def script(layout: str) -> float:
    """The median step of the hand-written script under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    # Without it a gloo job of torch 2.13 cannot restart, and what both sides measure is the same.
    env = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(compiled.folder()),  # what DeepSpeed would compile at its first use
    }
    with Child([*command, str(SCRIPTS / f"{layout}.py"), "--steps", str(NUM_STEPS)], env=env) as child:
        line, _ = child.line("STEP ", LIMIT_S)
    return float(json.loads(line.removeprefix("STEP "))["step_s"])


def ours(ranks: "lk.cluster.Ranks", plan: "lk.plan.Plan", *, trace: bool) -> float:
    """The median step on live ranks: the time between the reports of two steps, as they reach the notebook."""
    reported_s: list[float] = []
    unsubscribe = ranks.subscribe("step", lambda rank, message: reported_s.append(time.perf_counter()))
    try:
        run = lk.launch.train(
            ranks, plan, NUM_STEPS, learning_rate=LEARNING_RATE, clip_norm=CLIP_NORM, trace=trace, progress=False
        )
    finally:
        unsubscribe()
    if len(reported_s) != NUM_STEPS or run.state != "done":
        raise RuntimeError(f"{run} reported {len(reported_s)} steps of {NUM_STEPS}")
    between = [later - earlier for earlier, later in itertools.pairwise(reported_s)]
    return statistics.median(between[WARM_UP_STEPS - 1 :])


def main() -> int:
    """Compare each layout; 0 when all bars are met."""
    options = arguments(__doc__, layouts=tuple(LAYOUTS))
    model = lk.spec.Model(**MODEL)
    met = True
    with lk.cluster.start(4, backend="gloo") as ranks:
        for name in options.layouts or LAYOUTS:
            say(f"{name}: {LAYOUTS[name]}, {model}")
            plan = lk.plan.build(model, lk.spec.Layout.parse(LAYOUTS[name]))
            jobs = {
                "torchrun script": lambda name=name: script(name),
                "labkit, tracing off": lambda plan=plan: ours(ranks, plan, trace=False),
                "labkit, tracing on": lambda plan=plan: ours(ranks, plan, trace=True),
            }
            comparison = compare(jobs, base="torchrun script", pairs=options.pairs)
            bars = {"labkit, tracing off": BAR, "labkit, tracing on": BAR}
            met = report(f"train step {name}", comparison, bars=bars) and met
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
