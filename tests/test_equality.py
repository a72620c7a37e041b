"""Verdicts of a comparison, its tables, and its picture."""

import json
import math
import pickle

import pytest

from labkit import show
from labkit.errors import PlanError
from labkit.launch import BANDS, Comparison, Parity, Reference
from labkit.launch.equality import judge
from labkit.spec import Layout, Model

STEPS = 5
ONES = (1.0,) * STEPS
NAMES = ("embedding.weight", "head.weight")


def reference(optimizer="sgd", precision="fp32"):
    return Reference(
        layout=Layout(microbatch_size=8, precision=precision),
        optimizer=optimizer,
        learning_rate=0.1,
        clip_norm=0.5,
        losses=ONES,
        grad_norms=ONES,
    )


def judged(text="dp2 b4", *, losses=(), grad_norms=(), weights=(), against=None):
    """A comparison; each argument is {step: difference}, for weights {step: {name: in learning rates}}."""
    against = against or reference()
    return judge(
        Layout.parse(text),
        against,
        losses=[1.0 + dict(losses).get(step, 0.0) for step in range(STEPS)],
        grad_norms=[1.0 + dict(grad_norms).get(step, 0.0) for step in range(STEPS)],
        weights={
            step: {name: against.learning_rate * dict(weights).get(step, {}).get(name, 0.0) for name in NAMES}
            for step in range(STEPS)
        },
    )


def without_result(text, verdict, why, optimizer="sgd"):
    nothing = {"verdicts": {}, "differences": {}, "weights": {}}
    return Comparison(layout=Layout.parse(text), optimizer=optimizer, verdict=verdict, why=why, **nothing)


def parity_of(*entries):
    return Parity(model=Model.preset("tiny"), num_steps=STEPS, seed=0, references=(reference(),), entries=entries)


ALL = (
    judged("dp1 b8"),
    judged("tp2 b8", losses={3: 1e-7}),
    judged("dp2 b4", losses={2: 0.25}, weights={2: {"head.weight": 0.5}}),
    without_result("pp2 b2", "failed", "[rank 1] LabError: loss is <nan>"),
    without_result("dp4 b2", "not run", "rank 1 is gone"),
)


@pytest.mark.parametrize(
    ("given", "verdict", "step"),
    [
        ({}, "equal", None),
        ({"losses": {0: 9e-6}}, "within rounding", None),
        ({"losses": {1: 2e-5, 3: 0.1}}, "different", 1),
        ({"losses": {3: 2e-5}, "grad_norms": {2: 2e-4}}, "different", 2),
        ({"grad_norms": {0: 9e-5}}, "within rounding", None),
        ({"grad_norms": {4: -2e-4}}, "different", 4),
        ({"weights": {4: {"head.weight": 9e-4}}}, "within rounding", None),
        ({"weights": {3: {"head.weight": 2e-3}}}, "different", 3),
        ({"weights": {3: {"head.weight": math.inf}}}, "different", 3),
        ({"losses": {1: math.nan}}, "different", 1),
    ],
)
def test_verdicts(given, verdict, step):
    found = judged(**given)
    assert (found.verdict, found.step) == (verdict, step)
    assert found.is_good == (verdict != "different")
    assert (found.parameter is None) == (step is None)


def test_the_parameter_is_the_one_that_differs_most_after_that_step():
    weights = {2: {"embedding.weight": 0.4, "head.weight": 0.3}, 4: {"embedding.weight": 1.0, "head.weight": 2.0}}
    found = judged(grad_norms={2: 0.5}, weights=weights)
    assert (found.step, found.parameter) == (2, "embedding.weight")
    assert found.weights == pytest.approx({"embedding.weight": 1.0, "head.weight": 2.0})
    assert found.differences == pytest.approx({"losses": 0.0, "grad_norms": 0.5, "weights": 2.0})
    assert "'dp2 b4' under sgd: different from step 2 on, grad_norms by 5.0e-01 (band 0.0001), weights by" in str(found)


def test_bands_are_wider_where_numbers_have_fewer_bits():
    for optimizer in ("adamw", "sgd"):
        narrow, wide = BANDS["fp32", optimizer], BANDS["bf16", optimizer]
        assert narrow.losses < wide.losses
        assert narrow.grad_norms < wide.grad_norms
        assert narrow.weights < wide.weights
    given = {"losses": {1: 1e-4}, "grad_norms": {1: 1e-3}}
    assert judged(**given).verdict == "different"
    assert judged("dp2 b4 bf16", **given, against=reference(precision="bf16")).verdict == "within rounding"


def test_the_table_says_all_of_it():
    result = parity_of(*ALL)
    text = str(result)
    assert text == repr(result)
    assert text.splitlines()[0] == (
        "5 layouts under sgd against one rank ('b8') over 5 steps, seed 0: "
        "1 equal, 1 within rounding, 1 different, 1 failed, 1 not run"
    )
    assert "'dp2 b4' under sgd: different from step 2 on" in text
    assert "most in head.weight." in text
    assert "'pp2 1f1b m4 b2' under sgd: failed. [rank 1] LabError: loss is <nan>" in text
    assert "sgd in fp32: gradients clipped to norm 0.5 in 5 of 5 steps (smallest norm 1)." in text
    page = result._repr_html_()
    assert page.count("<tr>") == 6
    assert "loss is &lt;nan&gt;" in page
    assert not result.passed
    assert parity_of(*ALL[:2]).passed
    assert result.entry("dp2 b4", "sgd") is ALL[2]
    assert result.entry(Layout.parse("dp2 b4"), "sgd") is ALL[2]
    with pytest.raises(KeyError):
        result.entry("dp2 b4", "adamw")
    assert pickle.loads(pickle.dumps(result)) == result


def cells(figure):
    return {
        (figure.layout.yaxis.ticktext[row], round(base + 0.48, 2)): (trace.name, text)
        for trace in figure.data
        for row, base, text in zip(trace.y, trace.base, trace.text, strict=True)
    }


def test_the_picture_has_a_cell_per_layout_optimizer_and_quantity():
    adamw = judged("tp2 b8", grad_norms={0: 1e-6}, against=reference("adamw"))
    figure = show.parity(parity_of(adamw, *ALL))
    drawn = cells(figure)
    assert len(drawn) == 3 * 6
    assert drawn["b8", 3.22] == ("equal", "=")
    assert drawn["tp2 b8", 3.22] == ("within rounding", "−7.0")
    assert drawn["tp2 b8", 1.0] == ("within rounding", "−6.0")
    assert drawn["dp2 b4", 3.22] == ("different", "−0.6")
    assert drawn["dp2 b4", 4.22] == ("equal", "=")
    assert drawn["pp2 1f1b m4 b2", 3.22] == ("failed", "failed")
    assert drawn["dp4 b2", 5.22] == ("not run", "not run")
    assert "2 of 5 layouts train as one rank does" in figure.layout.title.text
    assert "clipping active in 5 of 5 steps" in figure.layout.annotations[1].text
    hovers = " ".join(hover for trace in figure.data for hover in trace.hovertext)
    assert "different: 2.50e-01 (relative), band 1e-05<br>first outside in step 2, most in head.weight" in hovers
    assert "&lt;nan&gt;" in hovers
    json.loads(figure.to_json())


def test_an_infinite_difference_is_drawn():
    drawn = cells(show.parity(parity_of(judged(weights={0: {"head.weight": math.inf}}))))
    assert drawn["dp2 b4", 2.0] == ("different", "∞")


def test_only_comparisons_are_drawn():
    with pytest.raises(PlanError, match=r"a list holds no comparisons: .*lk\.launch\.parity"):
        show.parity([])
