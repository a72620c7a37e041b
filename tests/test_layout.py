import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import PlanError
from labkit.spec import Layout
from labkit.spec.layout import ENGINES, OFFLOADS, PRECISIONS, RECOMPUTES, SCHEDULES

DEGREES = st.integers(1, 65_536)
LAYOUTS = st.builds(
    Layout,
    dp=DEGREES,
    tp=DEGREES,
    pp=DEGREES,
    zero_stage=st.integers(0, 3),
    schedule=st.sampled_from(SCHEDULES),
    num_microbatches=st.none() | DEGREES,
    microbatch_size=DEGREES,
    num_virtual_stages=DEGREES,
    precision=st.sampled_from(PRECISIONS),
    sequence_parallel=st.booleans(),
    recompute=st.sampled_from(RECOMPUTES),
    offload=st.sampled_from(OFFLOADS),
    engine=st.sampled_from(ENGINES),
    reshard_after_forward=st.none() | st.booleans(),
    hybrid=DEGREES,
)


@given(LAYOUTS)
def test_parse_undoes_str(layout):
    assert Layout.parse(str(layout)) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout


@given(LAYOUTS, st.randoms(use_true_random=False))
def test_tokens_stand_in_any_order(layout, random):
    tokens = str(layout).split()
    random.shuffle(tokens)
    assert Layout.parse("  \n".join(tokens)) == layout


@given(
    st.text(max_size=30)
    | st.lists(st.sampled_from(["dp2", "tp", "zero9", "m0", "1f1b", "dp", "-", "é", "99"])).map(" ".join)
)
def test_any_text_is_a_layout_or_refused(text):
    try:
        layout = Layout.parse(text)
    except PlanError:
        return
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("dp1", "dp1"),
        ("fp32", "dp1"),
        ("1f1b", "dp1"),
        ("dp2 pp2 zero1 1f1b m8 bf16", "dp2 pp2 zero1 1f1b m8 bf16"),
        ("pp2", "pp2 1f1b m4"),
        ("m4 tp2", "tp2 m4"),
        ("gpipe pp4", "pp4 gpipe m8"),
        ("tp2 sp recompute:selective", "tp2 sp recompute:selective"),
        ("zero3 offload:all no_reshard hybrid2 dp4 deepspeed", "dp4 zero3 offload:all deepspeed no_reshard hybrid2"),
        ("pp2 interleaved v2 m4 b3 fp8 torch", "pp2 interleaved v2 m4 b3 fp8 torch"),
    ],
)
def test_canonical_text(text, canonical):
    assert str(Layout.parse(text)) == canonical


def test_left_out_means_one_except_microbatches():
    assert Layout() == Layout.parse("dp1 tp1 pp1 zero0 1f1b m1 b1 v1 fp32 hybrid1")
    assert Layout(pp=4).num_microbatches == 8
    assert Layout(pp=65_536).num_microbatches == 65_536
    assert Layout.parse("dp3 tp2 pp2 b5 m7").global_batch_size == 105
    assert Layout.parse("dp3 tp2 pp2").world_size == 12


@pytest.mark.parametrize(
    ("token", "guess"),
    {
        "pd2": "dp2",
        "DP2": "dp2",
        "dp": "dp2",
        "dp=4": "dp4",
        "zero-1": "zero1",
        "1f1": "1f1b",
        "gpip": "gpipe",
        "bf6": "bf16",
        "interleave": "interleaved",
        "recompute": "recompute:full",
        "zb": "zbv",
        "hybird8": "hybrid8",
        "fp16": "bf16",
        "FSDP": "zero3",
    }.items(),
)
def test_a_wrong_token_gets_a_guess(token, guess):
    with pytest.raises(PlanError, match=rf"'{token}' is not a layout token: .*Did you mean '{guess}'\?"):
        Layout.parse(f"tp2 {token}")


def test_a_strange_token_gets_an_example():
    with pytest.raises(PlanError, match=r"'xyzzy' is not a layout token: .*Example: 'dp2 tp2 pp2 1f1b m8 bf16'"):
        Layout.parse("xyzzy")
    with pytest.raises(PlanError, match=r"'dp2,pp2' is not .*Put a space where the comma is\."):
        Layout.parse("dp2,pp2")
    with pytest.raises(PlanError, match=r"'dp2tp2m4' is not .*Put a space between tokens: 'dp2 tp2 m4'\."):
        Layout.parse("dp2tp2m4")


@pytest.mark.parametrize(
    "text", ["dp2 dp4", "dp2 dp2", "gpipe 1f1b", "fp32 bf16", "torch deepspeed", "reshard no_reshard", "sp sp"]
)
def test_a_field_is_set_once(text):
    with pytest.raises(PlanError, match="both set"):
        Layout.parse(text)


@pytest.mark.parametrize("text", ["", "   ", "\n\t"])
def test_no_token(text):
    with pytest.raises(PlanError, match="has no token"):
        Layout.parse(text)


@pytest.mark.parametrize("text", [None, 3, b"dp2", ["dp2"], Layout()])
def test_no_text(text):
    with pytest.raises(PlanError, match="is not text"):
        Layout.parse(text)


@pytest.mark.parametrize(
    "text", ["dp99999999999999999999", "m" + "9" * 5000, "tp65537", "dp0", "m00", "zero4", "b2147483648"]
)
def test_a_number_out_of_range(text):
    with pytest.raises(PlanError):
        Layout.parse(text)


def test_arabic_digits_and_signs_are_no_numbers():
    for text in ("dp٢", "dp-2", "dp+2", "dp2.0", "dp²"):
        with pytest.raises(PlanError, match="is not a layout token"):
            Layout.parse(text)


COUNTS = ["dp", "tp", "pp", "microbatch_size", "num_microbatches", "num_virtual_stages", "hybrid"]


@pytest.mark.parametrize("field", [*COUNTS, "zero_stage"])
@pytest.mark.parametrize("value", [None, True, False, 1.5, 2.0, math.nan, math.inf, -1, "2", [1], b"1", 10**20, 1j])
def test_a_count_of_the_wrong_type_or_size(field, value):
    if value is None and field == "num_microbatches":
        return
    with pytest.raises(PlanError, match=field):
        Layout(**{field: value})


def test_the_message_has_value_rule_and_fix():
    with pytest.raises(PlanError, match=r"^dp=2\.0 is a float: dp is a whole number\. Use dp=2\.$"):
        Layout(dp=2.0)
    with pytest.raises(PlanError, match=r"^dp=0 is below 1: dp starts there\. Use dp=1\.$"):
        Layout(dp=0)
    with pytest.raises(PlanError, match=r"^schedule='1f1' is unknown: .*Did you mean '1f1b'\?$"):
        Layout(schedule="1f1")


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "schedule": [None, "", 1, "1F1B", ["gpipe"]],
        "precision": [None, "fp16", 32, True],
        "recompute": [None, True, "all"],
        "offload": [None, False, "cpu"],
        "engine": [None, "megatron", 0],
        "sequence_parallel": [None, 1, "true"],
        "reshard_after_forward": [1, "no", 0.0],
    }.items(),
)
def test_a_word_that_is_none(field, values):
    for value in values:
        with pytest.raises(PlanError, match=field):
            Layout(**{field: value})
