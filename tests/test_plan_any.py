"""Any model under any layout: a plan whose parts fit together, or a refusal whose fix helps."""

import re
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import plan as planning
from labkit import schedule
from labkit.errors import PlanError
from labkit.plan import AXES
from labkit.plan.shards import of_rank, parameters
from labkit.spec import Layout, Model
from labkit.spec.layout import ENGINES, OFFLOADS, PRECISIONS, RECOMPUTES, SCHEDULES

MANY = settings(max_examples=400)


@st.composite
def models(draw):
    num_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 12, 12, 12]))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    return Model(
        num_layers=draw(st.sampled_from([1, 3, 8, 9, 12])),
        num_heads=num_heads,
        d_model=2 * num_heads * draw(st.integers(1, 2)),
        num_kv_heads=num_heads // groups if num_heads % groups == 0 else num_heads,
        d_ff=draw(st.sampled_from([7, 8, 12, 12, 12, 16])),
        vocab_size=draw(st.sampled_from([5, 8, 12, 12, 12, 12])),
        seq_len=draw(st.sampled_from([3, 4, 6, 8])),
        norm=draw(st.sampled_from(["rms", "layer"])),
        position=draw(st.sampled_from(["rope", "learned"])),
        bias=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
    )


FITTING = [
    (pp, schedule, v)
    for pp in (2, 3, 4)
    for schedule, v in (("1f1b", 1), ("gpipe", 1), *((one, 2) for one in SCHEDULES[2:-1]))
]
FIELDS = {
    "dp": st.sampled_from([2, 3, 4, 6]),
    "tp": st.sampled_from([2, 2, 3, 4]),
    "zero_stage": st.sampled_from([1, 2, 3]),
    "num_microbatches": st.sampled_from([1, 2, 3, 4, 6, 8]),
    "microbatch_size": st.just(2),
    "precision": st.sampled_from(PRECISIONS),
    "sequence_parallel": st.sampled_from([False, False, True]),
    "recompute": st.sampled_from(RECOMPUTES),
    "offload": st.sampled_from([*["none"] * 4, *OFFLOADS]),
    "engine": st.sampled_from([*["auto"] * 4, *ENGINES]),
    "reshard_after_forward": st.sampled_from([None, None, None, True, False]),
    "hybrid": st.sampled_from([1, 1, 1, 1, 2, 3]),
}


@st.composite
def layouts(draw):
    """Any layout: each field says something half of the time, and half of the pipelines have a schedule that fits."""
    said = {name: draw(strategy) for name, strategy in FIELDS.items() if draw(st.booleans())}
    free = st.tuples(st.integers(1, 4), st.sampled_from(SCHEDULES), st.integers(1, 3))
    pp, schedule, v = draw(st.one_of(st.just((1, "1f1b", 1)), st.sampled_from(FITTING), free))
    return Layout(**said, pp=pp, schedule=schedule, num_virtual_stages=v)


@MANY
@given(models(), layouts())
def test_a_plan_whose_parts_fit_together_or_a_refusal_whose_fix_helps(model, layout):
    assert Layout.parse(str(layout)) == layout
    try:
        plan = build(model, layout)
    except PlanError as error:
        check_refusal(model, layout, str(error))
        return
    assert plan.layout == layout
    assert plan.engine in ENGINES[1:]
    check_ranks(plan)
    check_actions(plan)
    check_shards(plan)


def check_ranks(plan):
    """Every rank has one place; the groups of each axis share all ranks out."""
    ranks = list(range(plan.world_size))
    assert [plan.rank_at(**plan.placement(rank)._asdict()) for rank in ranks] == ranks
    for axis in AXES:
        assert sorted(rank for group in plan.groups(axis) for rank in group) == ranks
    stages = [stage for pp_rank in range(plan.layout.pp) for stage in plan.stages(plan.rank_at(pp_rank=pp_rank))]
    assert sorted(stages) == list(range(plan.num_stages))
    assert [layer for stage in range(plan.num_stages) for layer in plan.layers(stage)] == list(
        range(plan.model.num_layers)
    )


def check_actions(plan):
    """Every stage computes every micro-batch, and no rank waits for ever."""
    schedule.validate(plan.actions, plan.num_stages, plan.layout.num_microbatches)
    for pp_rank, line in enumerate(plan.actions):
        assert {action.stage for action in line} == set(plan.stages(plan.rank_at(pp_rank=pp_rank)))


def check_shards(plan):
    """What ranks update covers every parameter, its elements equally often: once for each copy."""
    held = {one.name: np.zeros((one.rows, one.columns), dtype=int) for one in parameters(plan)}
    for rank in range(plan.world_size):
        boxes = [(shard.name, box) for shard in of_rank(plan, rank) for box in shard.states]
        for name, box in boxes:
            held[name][box.top : box.bottom, box.left : box.right] += 1
        if plan.engine == "torch":
            assert sum(box.num_elements for _, box in boxes) == plan.holding(rank).optimizer
    for counts in held.values():
        assert counts.min() == counts.max() > 0


QUOTED = re.compile(r"'([^']+)'")
NAMED = re.compile(r"\b([a-z_]+)=(\d+(?:, \d+)*(?:,? or \d+)?)")
NAME = re.compile(r"\w+")
TOKENS = re.compile(r"\b([a-z]+)(\d+)\b")
FIELD_OF = {"zero": "zero_stage", "v": "num_virtual_stages", "m": "num_microbatches", "b": "microbatch_size"}


def check_refusal(model, layout, message):
    """Fact: rule. Fix. And what the fix names builds, or is at least not refused for the same again."""
    rule, _, fix = message.partition(": ")[2].partition(". ")
    name = NAME.match(message)[0]
    assert message.endswith(".")
    changes = list(changes_of(model, layout, fix))
    assert changes, message
    for changed_model, changed in changes:
        again = refusal(changed_model, changed)
        assert not (again.startswith(name) and rule in again), f"{message} -> {changed_model}, {changed}"


def build(model, layout):
    """With the schedule of looped BFS in place of one's own."""
    own = None
    if layout.schedule == "own" and layout.pp > 1:
        own = schedule.looped_bfs(layout.pp, layout.num_microbatches, layout.num_virtual_stages)
    return planning.build(model, layout, schedule=own)


def refusal(model, layout):
    try:
        build(model, layout)
    except PlanError as error:
        return str(error)
    return ""


def changes_of(model, layout, fix):
    """The model and layout after each change that a fix names; a whole layout in quotes builds as it is."""
    for text in QUOTED.findall(fix):
        named = Layout.parse(text)
        assert refusal(model, named) == "", fix
        yield model, named
    fix = re.sub(r"'[^']+'|\([^)]*\)", "", fix)
    if fix.endswith("or bf16."):
        yield model, replace(layout, precision="bf16")
        fix = fix.removesuffix("or bf16.")
    for token, number in TOKENS.findall(fix.replace("1f1b", "")):
        yield model, replace(layout, **{FIELD_OF.get(token, token): int(number)})
    for name, values in NAMED.findall(fix):
        for value in map(int, re.findall(r"\d+", values)):
            if name in Model.__dataclass_fields__:
                yield replace(model, **{name: value}), layout
            else:
                yield model, replace(layout, **{name: value})
