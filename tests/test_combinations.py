"""What `plan.build` takes and refuses, over all fields at once: the page of the docs, and layouts by the hundred."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import parity
from labkit import plan as planning
from labkit.errors import PlanError
from labkit.plan import combinations
from labkit.spec import Layout, Model
from labkit.spec.layout import ENGINES, OFFLOADS, PRECISIONS, RECOMPUTES, SCHEDULES

MODELS = (
    Model(num_layers=8, d_model=96, num_heads=12, vocab_size=240, seq_len=32, d_ff=240),
    Model(num_layers=3, d_model=48, num_heads=6, num_kv_heads=2, vocab_size=257, seq_len=33, tied_embeddings=True),
    Model(num_layers=1, d_model=8, num_heads=1, vocab_size=7, seq_len=1),
)
LAYOUTS = st.builds(
    Layout,
    dp=st.integers(1, 6),
    tp=st.sampled_from([1, 1, 2, 3, 4, 5, 8, 12]),
    pp=st.sampled_from([1, 1, 2, 3, 4, 8, 9]),
    zero_stage=st.integers(0, 3),
    schedule=st.sampled_from([name for name in SCHEDULES if name != "own"]),  # which is given beside the layout
    num_microbatches=st.one_of(st.none(), st.integers(1, 17)),
    microbatch_size=st.integers(1, 3),
    num_virtual_stages=st.integers(1, 4),
    precision=st.sampled_from(PRECISIONS),
    sequence_parallel=st.booleans(),
    recompute=st.sampled_from(RECOMPUTES),
    offload=st.sampled_from(OFFLOADS),
    engine=st.sampled_from(ENGINES),
    reshard_after_forward=st.sampled_from([None, True, False]),
    hybrid=st.integers(1, 6),
)
TOKENS = {"v": "num_virtual_stages", "m": "num_microbatches", "zero": "zero_stage", "b": "microbatch_size"}
WORDS = {
    "leave sp out": {"sequence_parallel": False},
    "drop it": {"reshard_after_forward": None, "hybrid": 1},
    "1f1b": {"schedule": "1f1b", "num_virtual_stages": 1},
    "offload:optimizer": {"offload": "optimizer"},
}
ADVICE = re.compile(rf"'[^']+'|{'|'.join(WORDS)}|[a-z_]+=\d+|[a-z]+\d+")
MOST_ADVICE = 12


def refusal(model, layout):
    """Why it is refused; "" when it builds. Anything but a `PlanError` fails the test."""
    try:
        planning.build(model, layout)
    except PlanError as error:
        return str(error)
    return ""


def followed(model, layout, message, number):
    """The model and layout after a piece of advice in a refusal: the first, or where that led back here the next."""
    pieces = ADVICE.findall(re.sub(r"\([^)]*\)", "", message.rpartition("Use ")[2]))
    assert pieces, f"no advice that a program can follow in {message!r}"
    piece = pieces[min(number, len(pieces) - 1)]
    if piece[0] == "'":
        return model, Layout.parse(piece[1:-1])
    if piece in WORDS:
        return model, replace(layout, **WORDS[piece])
    name, value = re.fullmatch(r"([a-z_]+?)=?(\d+)", piece).groups()
    change = {TOKENS.get(name, name): int(value)}
    is_layout = next(iter(change)) in Layout.__dataclass_fields__
    return (model, replace(layout, **change)) if is_layout else (replace(model, **change), layout)


@settings(max_examples=400)
@given(st.sampled_from(MODELS), LAYOUTS)
def test_a_layout_that_is_named_instead_builds(model, layout):
    message = refusal(model, layout)
    for named in re.findall(r"Use '([^']+)'", message):
        assert refusal(model, Layout.parse(named)) == "", f"{layout}: {message}"


@settings(max_examples=400)
@given(st.sampled_from(MODELS), LAYOUTS)
def test_advice_that_is_followed_ends_in_a_plan(model, layout):
    messages = []
    while message := refusal(model, layout):
        assert len(messages) <= MOST_ADVICE, messages
        model, layout = followed(model, layout, message, messages.count(message))
        messages.append(message)


@settings(max_examples=200)
@given(LAYOUTS)
def test_a_refusal_is_one_line_with_fact_and_fix(layout):
    message = refusal(MODELS[0], layout)
    assert message == "" or re.fullmatch(r"[^\n]{10,500}\.", message), message
    assert message == "" or "Use " in message


def test_the_page_of_supported_layouts_is_what_the_code_makes(repository):
    kept = (repository / "docs" / "layouts.md").read_text(encoding="utf-8")
    assert kept == combinations.page(), "run: python -m labkit.plan.combinations docs/layouts.md"


def test_every_combination_runs_or_fails_for_a_reason_on_the_page():
    rows = [row for found in combinations.supported().values() for row in combinations.merged(found)]
    running = {one for found in combinations.supported().values() for one in found}
    listed = 0
    for row in rows:
        size = 1
        for values in row:
            size *= len(values)
        listed += size
    assert listed == len(running), "a combination stands in two rows, or a row holds one that does not run"
    assert combinations.supported()["torch"]
    reasons = dict(combinations.refused())
    assert all(str(refusal(combinations.MODEL, layout)) == why for layout, why in reasons.items())


@pytest.mark.parametrize("zero", [0, 1])
def test_hybrid_needs_shards_of_gradients(zero):
    message = refusal(MODELS[0], Layout(dp=4, zero_stage=zero, hybrid=2))
    assert message.startswith(f"hybrid=2 with zero_stage={zero}: it replicates groups that shard gradients")


def test_the_benchmark_of_parity_covers_what_builds():
    every = [*parity.layouts("fp32"), *parity.layouts("bf16"), *parity.layouts("fp8")]
    assert {(layout.world_size, layout.global_batch_size) for layout in every} == {(2, 8), (3, 12), (4, 8)}
    assert {(layout.dp, layout.tp, layout.pp) for layout in every} >= {(4, 1, 1), (1, 4, 1), (1, 1, 4), (1, 2, 2)}
    running = {one for found in combinations.supported().values() for one in found}
    for column, values in combinations.FIELDS.items():
        index = list(combinations.FIELDS).index(column)
        for value in values:
            if any(one[index] == value for one in running):
                assert any(holds(layout, column, value) for layout in every), f"no layout with {column} {value}"


def holds(layout, column, value):
    if column == "shards":
        form = {True: "reshard", False: "no_reshard"}.get(layout.reshard_after_forward, "all of dp")
        return value == ("hybrid" if layout.hybrid > 1 else form)
    if column == "tp":
        return value == f"{layout.tp}{' sp' * layout.sequence_parallel}"
    if column == "engine":
        return value in ("auto", planning.build(parity.MODEL, layout).engine)
    return value == str(getattr(layout, {"zero": "zero_stage"}.get(column, column)))
