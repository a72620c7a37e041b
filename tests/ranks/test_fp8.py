"""FP8 training is one rank's training under every kind of layout, with one rank's scales, and communicates little."""

import functools

import pytest

from labkit.errors import PlanError
from labkit.plan import build
from labkit.spec import Fp8, Layout, Model, Training
from tests.ranks import bare

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]  # one world runs all jobs in the first test

MODEL = Model(num_layers=4, d_model=64, num_heads=4, num_kv_heads=2, vocab_size=256, seq_len=16)
GPT = Model(
    num_layers=4,
    d_model=64,
    num_heads=4,
    vocab_size=256,
    seq_len=16,
    norm="layer",
    position="learned",
    activation="gelu",
    bias=True,
    tied_embeddings=True,
)
REFERENCE = "m4"
# A micro-batch of one sample each, so the same products everywhere. The zero-bubble schedules halve their backwards.
SAME = (
    "dp4",
    "dp2 zero2 m2 torch",
    "dp2 zero3 m2 recompute:full torch",
    "pp2 m4 recompute:selective",
    "dp2 pp2 zbv v2 zero3 m2",
    "pp2 interleaved_zero_bubble v2 m4",
)
# Sums over tp are those of other numbers, rounded to bf16 in between.
SPLIT = ("tp2 m4", "tp2 sp m4", "dp2 tp2 zero3 m2", "tp2 pp2 m4 recompute:full")
# DeepSpeed divides by dp after the backward, so its gradients are cast dp times as large.
ON_DEEPSPEED = "dp4 zero3 deepspeed"
OF_GPT = ("dp4", "dp2 pp2 zbv v2 zero3 m2", "tp2 sp m4", "dp2 tp2 zero3 m2")  # biases, and a matrix on two stages
RECIPES = {"delayed": Fp8(history=4), "current": Fp8(recipe="current"), "block": Fp8(recipe="block")}
NUM_STEPS = 4


def train(text, model=MODEL, precision="fp8", **options):
    """Runs in each rank: what `training.train` gave, and the reports on FP8."""
    from labkit.rank import report, training

    messages = []
    report.install(lambda topic, message: messages.append(message) if topic == "fp8" else None)
    settings = {"num_steps": NUM_STEPS, "optimizer": "sgd", "learning_rate": 0.5, "weight_decay": 0.0, "trace": False}
    try:
        result = training.train(build(model, Layout.parse(f"{text} {precision}")), Training(**(settings | options)))
    finally:
        report.install(None)
    return result, messages


def all_layouts():
    from labkit.rank import state

    found = {}
    for model, texts in ((MODEL, (*SAME, *SPLIT, ON_DEEPSPEED)), (GPT, OF_GPT)):
        for text in (REFERENCE, *texts):
            result, _ = train(text, model, fp8=RECIPES["delayed"])
            if result is not None:
                found[model.norm, text] = result["losses"], result["grad_norms"], state.current().scaling.state()
    return found


def all_recipes():
    found = {}
    for name, recipe in RECIPES.items():
        for text in (REFERENCE, "dp4 zero3 torch", "tp2 dp2 m2", "pp2 interleaved_zero_bubble v2 m4"):
            result, messages = train(text, fp8=recipe, record_fp8=True)
            if result is not None:
                found[name, text] = result["losses"], result["grad_norms"], messages
    twin, _ = train(REFERENCE, precision="bf16")
    return found if twin is None else found | {"bf16": twin["losses"]}


def traffic(recipe, record):
    from labkit.rank import report, training

    steps = []
    report.install(lambda topic, message: steps.append(message["events"]) if topic == "events" else None)
    try:
        plan = build(MODEL, Layout.parse("dp4 fp8"))
        training.train(plan, Training(num_steps=2, fp8=RECIPES[recipe], record_fp8=record))
    finally:
        report.install(None)
    return [[(row[0], row[8]) for row in rows if row[6] == "world"] for rows in steps]


def all_traffic():
    return {(recipe, record): traffic(recipe, record) for recipe in RECIPES for record in (False, True)}


def going_on():
    """Six steps at once, and two and four; then a recipe that the state does not have."""
    recipe = Fp8(history=2)
    once = train("dp2 pp2 m2", num_steps=6, fp8=recipe)[0]["losses"]
    parts = train("dp2 pp2 m2", num_steps=2, fp8=recipe)[0]["losses"]
    parts += train("dp2 pp2 m2", num_steps=4, fp8=recipe, start="live", record_fp8=True)[0]["losses"]
    try:
        train("dp2 pp2 m2", start="live")
    except PlanError as error:
        return once, parts, str(error)
    return once, parts, None


def all_jobs():
    return {"layouts": all_layouts(), "recipes": all_recipes(), "traffic": all_traffic(), "live": going_on()}


@functools.cache
def results():
    return bare.run(all_jobs, 4)


def distance(found, wanted):
    return max(abs(one - other) / other for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("norm", "text"), [*(("rms", text) for text in (*SAME, *SPLIT)), *(("layer", text) for text in OF_GPT)]
)
def test_a_layout_trains_as_one_rank_does_and_has_its_scales(norm, text):
    found = results()[0]["layouts"]
    losses, norms, scales = found[norm, text]
    wanted_losses, wanted_norms, wanted_scales = found[norm, REFERENCE]
    is_same = text in SAME
    assert distance(losses, wanted_losses) < (1e-4 if is_same else 2e-3)
    assert distance(norms, wanted_norms) < (1e-3 if is_same else 2e-2)
    ratio = scales["scale"] / wanted_scales["scale"]
    assert ratio.min() > (0.98 if is_same else 0.6)
    assert ratio.max() < (1.02 if is_same else 1.6)
    # Rank 3 has the scales of all layers, too.
    other = results()[3]["layouts"].get((norm, text))
    assert other is None or (other[2]["scale"] == scales["scale"]).all()


def test_deepspeed_trains_as_one_rank_does():
    found = results()[0]["layouts"]
    losses, norms, _ = found["rms", ON_DEEPSPEED]
    assert distance(losses, found["rms", REFERENCE][0]) < 2e-3
    assert distance(norms, found["rms", REFERENCE][1]) < 2e-2


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("text", ["dp4 zero3 torch", "tp2 dp2 m2", "pp2 interleaved_zero_bubble v2 m4"])
def test_every_recipe_trains_under_every_axis(recipe, text):
    found = results()[0]["recipes"]
    assert distance(found[recipe, text][0], found[recipe, REFERENCE][0]) < 3e-3
    assert distance(found[recipe, text][0], found["bf16"]) < 1e-2
    assert found[recipe, text][0] != found["bf16"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_reports_name_every_tensor_and_what_its_cast_did(recipe):
    messages = results()[0]["recipes"][recipe, REFERENCE][2]
    assert [message["step"] for message in messages] == list(range(NUM_STEPS))
    for message in messages:
        names = {(row[0], row[1]) for row in message["rows"]}
        assert len(names) == len(message["rows"]) == 4 * 7 * 3
        assert ("layers.3.feed_forward.down", "gradient") in names
    first, last = messages[0]["rows"], messages[-1]["rows"]
    for _, role, amax, scale, flushed, saturated, error in last:
        assert amax > 0
        assert 0 <= flushed < 0.3
        assert 0 <= saturated < 0.01
        assert 0.005 < error < 0.3
        if recipe == "current":
            assert scale == pytest.approx(Fp8(recipe=recipe).largest(role) / amax, rel=1e-5)
        if recipe == "block":
            assert 224 < scale * amax <= 448
    if recipe == "delayed":  # scales start at 1, where gradients are too small for E5M2
        assert all(row[3] == 1.0 for row in first)
        assert max(row[4] for row in first if row[1] == "gradient") > 0.5
    else:
        assert max(row[4] for row in first if row[1] == "gradient") < 0.3


def test_reports_under_a_layout_count_all_ranks():
    found = results()[0]["recipes"]
    for text in ("dp4 zero3 torch", "tp2 dp2 m2", "pp2 interleaved_zero_bubble v2 m4"):
        rows, wanted = (found["delayed", name][2][0]["rows"] for name in (text, REFERENCE))
        assert [row[:2] for row in rows] == [row[:2] for row in wanted]
        weights = [(row[2], other[2]) for row, other in zip(rows, wanted, strict=True) if row[1] == "weight"]
        assert all(one == pytest.approx(other) for one, other in weights)
    assert all(not results()[rank]["recipes"]["delayed", "dp4 zero3 torch"][2] for rank in (1, 2, 3))


def test_delayed_scaling_sends_one_number_per_tensor_and_the_others_nothing():
    num_tensors = 4 * 7 * 3
    agree = ("all_reduce", 3 * 8)
    amax, tops, sums = (("all_reduce", size * num_tensors) for size in (4, 2 * 4, 5 * 8))
    for rank in range(4):
        found = results()[rank]["traffic"]
        for steps, wanted in (
            (found["delayed", False], [agree, amax]),
            (found["current", False], [agree]),
            (found["block", False], [agree]),
            (found["delayed", True], [agree, tops, sums, amax]),
            (found["current", True], [agree, tops, sums]),
        ):
            assert steps == [wanted] * 2


def test_scales_go_on_with_a_live_state_and_another_recipe_is_refused():
    for once, parts, refused in (result["live"] for result in results()):
        assert once == parts
        assert "has Fp8(recipe='delayed', format='hybrid', history=2" in refused
        assert refused.endswith("Use that recipe or start='fresh'.")
