"""Every layout that `plan.build` supports on 2, 3 and 4 ranks, against one rank.

    python -m benchmarks.parity [--pairs N] [--shard I/N] [fp32] [bf16] [torch] [deepspeed] [8]

Words choose: a precision (fp32 where none is named), the engine that runs a layout (any where none is named), and 8
ranks in place of 2 to 4. A shard is every Nth layout from the Ith on, to take the work in parts. Verdicts are printed
as they become known.

The number of pairs is not used: numbers are compared, not times. The bars are those of the verdicts: losses 1e-5 and
gradient norms 1e-4, relative, over 5 steps, under AdamW and under SGD with clipping active.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import labkit as lk
from benchmarks.pairs import json_line, say
from labkit.errors import PlanError
from labkit.launch.comparing import OPTIMIZERS
from labkit.launch.equality import QUANTITIES, Comparison, difference_text
from labkit.plan import Plan
from labkit.spec import Layout, Model
from labkit.spec.layout import OFFLOADS, RECOMPUTES, SCHEDULES

# Eight layers: also four ranks with two stages each have one layer for every stage.
MODEL = Model(num_layers=8, d_model=32, num_heads=4, vocab_size=256, seq_len=32)
NUM_SAMPLES = 8  # of a step; 12 where 3 ranks share them
DEGREES = (1, 2, 3, 4, 8)
LIMIT_S = 120.0
PRECISIONS = ("fp32", "bf16", "fp8")
TOGETHER = 4
"""Layouts between two reports: one rank is trained anew for each lot, and that costs little."""

# A V on two ranks; the last stage's backward is split for micro-batch 0 and whole for micro-batch 1.
OWN = """
0F0 0F1 3F0 3I0 3W0 3F1 3B1 0B0 0B1
1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
"""
ENGINES = ("torch", "deepspeed")
OWN_LAYOUTS = ("pp2 own v2 m2 b4", "dp2 pp2 own v2 m2 b2", "dp2 pp2 zero1 own v2 m2 b2", "dp2 pp2 zero3 own v2 m2 b2",
               "tp2 pp2 own v2 m2 b4 sp recompute:full")  # fmt: skip


def layouts(precision: str = "fp32", num_ranks: Sequence[int] = (2, 3, 4)) -> list[Layout]:
    """All that build: degrees, sharding, schedules, micro-batches, and each further option by itself."""
    found = {}
    for dp, tp, pp in itertools.product(DEGREES, repeat=3):
        if dp * tp * pp in num_ranks:
            for layout in _of_degrees(Layout(dp=dp, tp=tp, pp=pp, precision=precision)):
                if _builds(layout):
                    found[layout] = None
    return list(found)


def plans(precision: str, num_ranks: Sequence[int]) -> list[Plan]:
    """The layouts as plans, and a schedule of one's own under a few."""
    found = [lk.plan.build(MODEL, layout) for layout in layouts(precision, num_ranks)]
    for text in OWN_LAYOUTS:
        layout = Layout.parse(f"{text} {precision}")
        if layout.world_size in num_ranks:
            found.append(lk.plan.build(MODEL, layout, schedule=OWN))
    return found


def _num_samples(layout: Layout) -> int:
    return NUM_SAMPLES + NUM_SAMPLES // 2 if layout.world_size == 3 else NUM_SAMPLES


def _of_degrees(base: Layout) -> Iterator[Layout]:
    num_samples = _num_samples(base)
    counts = [m for m in (1, 2, 3, 4, 6, 8) if m >= base.pp and num_samples % (base.dp * m) == 0][:2]
    for m, sharding, schedule in itertools.product(counts, _shardings(base.dp), _schedules(base.pp)):
        batch = {"num_microbatches": m, "microbatch_size": num_samples // (base.dp * m)}
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
    options = _arguments()
    num_ranks = (8,) if "8" in options.words else (2, 3, 4)
    engines = [word for word in options.words if word in ENGINES]
    index, count = options.shard
    passed = True
    with lk.cluster.start(max(num_ranks), backend="gloo") as ranks:
        for precision in [word for word in options.words if word in PRECISIONS] or PRECISIONS[:1]:
            every = [plan for plan in plans(precision, num_ranks) if not engines or plan.engine in engines]
            chosen = every[index - 1 :: count]
            say(f"{len(chosen)} of {len(every)} layouts in {precision}, {MODEL}")
            entries = list(_compare(ranks, chosen))
            for entry in entries:
                if not entry.is_good:
                    print(entry)
            largest = {
                f"{optimizer} {name}": max(
                    (one.differences.get(name, math.inf) for one in entries if one.optimizer == optimizer), default=0.0
                )
                for optimizer in OPTIMIZERS
                for name in QUANTITIES
            }
            met = all(entry.is_good for entry in entries)
            shard = f"{index}/{count}"
            json_line("parity", precision=precision, layouts=len(chosen), shard=shard, largest=largest, met=met)
            passed = passed and met
    return 0 if passed else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="fp32|bf16|torch|deepspeed|8")
    parser.add_argument("--pairs", type=int, help="not used")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="every Nth layout from the Ith on")
    options = parser.parse_args()
    known = (*PRECISIONS, *ENGINES, "8")
    if unknown := sorted(set(options.words) - set(known)):
        parser.error(f"unknown {', '.join(unknown)}: choose from {', '.join(known)}")
    return options


def _shard(text: str) -> tuple[int, int]:
    index, count = (int(part) for part in text.split("/"))
    if not 1 <= index <= count:
        raise ValueError(text)
    return index, count


def _compare(ranks: lk.cluster.Ranks, chosen: Sequence[Plan]) -> Iterator[Comparison]:
    """The comparisons of all, printed as they come; those that share samples go together."""
    for _, same in itertools.groupby(chosen, key=lambda plan: plan.layout.global_batch_size):
        lot = list(same)
        for start in range(0, len(lot), TOGETHER):
            result = lk.launch.parity(ranks, MODEL, lot[start : start + TOGETHER], progress=False, timeout_s=LIMIT_S)
            for entry in result.entries:
                numbers = "  ".join(f"{difference_text(entry, name):>8}" for name in QUANTITIES)
                print(f"{entry.layout!s:60} {entry.optimizer:6} {entry.verdict:16} {numbers}", flush=True)
            yield from result.entries


if __name__ == "__main__":
    sys.exit(main())
