"""Every layout that `plan.build` supports on 2 and 4 ranks, against one rank, in fp32.

    python -m benchmarks.parity [--pairs N] [bf16]

The number of pairs is not used: numbers are compared, not times. The bars are those of the verdicts: losses 1e-5 and
gradient norms 1e-4, relative, over 5 steps, under AdamW and under SGD with clipping active.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

import labkit as lk
from benchmarks.pairs import arguments, json_line, say
from labkit.errors import PlanError
from labkit.spec import Layout, Model
from labkit.spec.layout import OFFLOADS, RECOMPUTES, SCHEDULES

# Eight layers: also four ranks with two stages each have one layer for every stage.
MODEL = Model(num_layers=8, d_model=32, num_heads=4, vocab_size=256, seq_len=32)
GLOBAL_BATCH_SIZE = 8
WORLD_SIZES = (2, 4)
DEGREES = (1, 2, 4)
LIMIT_S = 120.0


def layouts(precision: str = "fp32") -> list[Layout]:
    """All that build: degrees, sharding, schedules, micro-batches, and each further option by itself."""
    found = {}
    for dp, tp, pp in itertools.product(DEGREES, repeat=3):
        if dp * tp * pp in WORLD_SIZES:
            for layout in _of_degrees(Layout(dp=dp, tp=tp, pp=pp, precision=precision)):
                if _builds(layout):
                    found[layout] = None
    return list(found)


def _of_degrees(base: Layout) -> Iterator[Layout]:
    counts = [m for m in (1, 2, 4, 8) if m >= base.pp and GLOBAL_BATCH_SIZE % (base.dp * m) == 0][:2]
    for m, sharding, schedule in itertools.product(counts, _shardings(base.dp), _schedules(base.pp)):
        batch = {"num_microbatches": m, "microbatch_size": GLOBAL_BATCH_SIZE // (base.dp * m)}
        layout = replace(base, **batch, **sharding, **schedule)
        yield layout
        if m == counts[0]:
            yield from _with_options(layout)


def _shardings(dp: int) -> Iterator[dict[str, object]]:
    yield {}
    if dp == 1:
        return
    for zero in (1, 2, 3):
        yield {"zero_stage": zero}
    yield {"zero_stage": 2, "reshard_after_forward": True}
    yield {"zero_stage": 3, "reshard_after_forward": False}
    for zero in (2, 3):
        yield {"zero_stage": zero, "hybrid": 2}


def _schedules(pp: int) -> Iterator[dict[str, object]]:
    for schedule in SCHEDULES if pp > 1 else SCHEDULES[:1]:
        for v in (1, 2):
            yield {"schedule": schedule, "num_virtual_stages": v}


def _with_options(layout: Layout) -> Iterator[Layout]:
    if layout.tp > 1:
        yield replace(layout, sequence_parallel=True)
    yield from (replace(layout, recompute=recompute) for recompute in RECOMPUTES[1:])
    yield from (replace(layout, offload=offload) for offload in OFFLOADS[1:])
    for engine in ("torch", "deepspeed"):
        forced = replace(layout, engine=engine)
        if _builds(forced) and (not _builds(layout) or _engine(forced) != _engine(layout)):
            yield forced


def _builds(layout: Layout) -> bool:
    try:
        return bool(_engine(layout))
    except PlanError:
        return False


def _engine(layout: Layout) -> str:
    return lk.plan.build(MODEL, layout).engine


def main() -> int:
    """Compare all; 0 when every layout trains as one rank does."""
    options = arguments(__doc__, layouts=("fp32", "bf16"))
    passed = True
    with lk.cluster.start(max(WORLD_SIZES), backend="gloo") as ranks:
        for precision in options.layouts or ["fp32"]:
            every = layouts(precision)
            say(f"{len(every)} layouts in {precision}, {MODEL}")
            result = lk.launch.parity(ranks, MODEL, every, timeout_s=LIMIT_S)
            print(result)
            largest = {
                f"{optimizer} {name}": max(
                    one.differences.get(name, float("inf")) for one in result.entries if one.optimizer == optimizer
                )
                for optimizer in ("adamw", "sgd")
                for name in ("losses", "grad_norms", "weights")
            }
            json_line("parity", precision=precision, layouts=len(every), largest=largest, met=result.passed)
            passed = passed and result.passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
