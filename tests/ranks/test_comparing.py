"""`launch.parity` on live ranks: layouts that train as one rank does, and every way not to."""

import pytest

import labkit as lk
from labkit.errors import ClusterError, PlanError, RankError
from labkit.launch.equality import judge

pytestmark = pytest.mark.ranks

MODEL = lk.spec.Model(num_layers=4, d_model=32, num_heads=4, vocab_size=256, seq_len=16)
WRONG_STEP = 2
WRONG_PARAMETER = "layers.1.feed_forward.down.weight"


def compared(ranks, layouts, **options):
    return lk.launch.parity(ranks, MODEL, layouts, **{"progress": False, **options})


OTHER = lk.spec.Model(num_layers=1, d_model=32, num_heads=4, vocab_size=256, seq_len=16)
IN_TURN = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
LAST_FIRST = "0F0 0F1 0B1 0B0\n1F0 1F1 1I1 1B0 1W1"


def own(schedule):
    """A plan over two ranks whose schedule somebody wrote."""
    return lk.plan.build(MODEL, lk.spec.Layout(pp=2, num_microbatches=2, microbatch_size=2), schedule=schedule)


def spoil_gradients(step, parameter, factor):
    """Runs on a rank: from a step on, the gradient of one parameter is wrong wherever dp is 2."""
    from labkit.rank import parameters, state

    right = parameters.Weights.collect_gradients

    def wrong(self):
        gradients = right(self)
        if self.plan.layout.dp == 2 and state.current().step >= step and parameter in gradients:
            gradients[parameter].mul_(factor)
        return gradients

    parameters.Weights.collect_gradients = wrong
    parameters.right = right


def mend_gradients():
    from labkit.rank import parameters

    parameters.Weights.collect_gradients = parameters.right


def spoil_one_replica():
    """Runs on a rank: under dp 4 rank 3 forgets what one token gives to the head."""
    import torch.distributed as dist

    from labkit.rank import parameters

    right = parameters.Weights.collect_gradients

    def wrong(self):
        gradients = right(self)
        if self.plan.layout.dp == 4 and dist.get_rank() == 3:
            gradients["head.weight"][ord(" ")] = 0.0
        return gradients

    parameters.Weights.collect_gradients = wrong
    parameters.right = right


def test_layouts_that_train_as_one_rank_does(ranks):
    written = own(LAST_FIRST)
    layouts = ["dp1 b4", "dp2 tp2 m2", lk.spec.Layout.parse("dp2 pp2 zero3 m2"), "pp2 m4 bf16", written]
    result = compared(ranks, layouts)
    assert result.passed, str(result)
    assert result.layouts[-1] == written.layout
    assert [entry.verdict for entry in result.entries[:2]] == ["equal", "equal"]
    assert [(str(entry.layout), entry.optimizer) for entry in result.entries[2:5]] == [
        ("dp2 tp2 m2", "adamw"), ("dp2 tp2 m2", "sgd"), ("dp2 pp2 zero3 1f1b m2", "adamw"),
    ]  # fmt: skip
    for entry in result.entries:
        assert len(entry.losses) == len(entry.grad_norms) == 5
        assert len(entry.weights) == 39
    for reference in result.references:
        assert str(reference.layout).split()[0] == "b4"
        if reference.optimizer == "sgd":
            assert reference.num_clipped == 5, "clipping was not active"
    assert (
        "5 layouts under adamw and sgd against one rank ('b4' and 'b4 bf16') over 5 steps, seed 0: 2 equal, 8 within"
        in str(result)
    )
    with pytest.raises(RankError, match=r"no live training state: lk\.launch\.parity compared layouts"):
        lk.launch.train(ranks, lk.plan.build(MODEL, result.layouts[0]), 1, start="live", progress=False)


def test_a_wrong_gradient_is_found_with_its_step_and_parameter(ranks):
    ranks.run(spoil_gradients, WRONG_STEP, WRONG_PARAMETER, 3.0)
    try:
        result = compared(ranks, ["dp1 b4", "dp2 b2"])
    finally:
        ranks.run(mend_gradients)
    assert result.entry("dp1 b4", "sgd").verdict == "equal"
    wrong = result.entry("dp2 b2", "sgd")
    assert (wrong.verdict, wrong.step, wrong.parameter) == ("different", WRONG_STEP, WRONG_PARAMETER)
    assert wrong.verdicts["grad_norms"] == "different"
    assert not result.passed
    assert f"'dp2 b2' under sgd: different from step {WRONG_STEP} on" in str(result)
    assert f"most in {WRONG_PARAMETER}." in str(result)


def test_a_replica_that_went_its_own_way_is_found(ranks):
    ranks.run(spoil_one_replica)
    try:
        result = compared(ranks, ["dp4"], num_steps=1)
    finally:
        ranks.run(mend_gradients)
    wrong = result.entry("dp4", "adamw")
    assert (wrong.verdict, wrong.step, wrong.parameter) == ("different", 0, "head.weight")
    assert wrong.verdicts["weights"] == "different"
    assert wrong.verdicts["losses"] != "different"


def test_another_seed_is_no_rounding(ranks):
    one, other = (compared(ranks, ["dp2 b2"], num_steps=2, seed=seed) for seed in (1, 2))
    entry = one.entries[0]
    found = judge(
        entry.layout,
        other.references[0],
        losses=entry.losses,
        grad_norms=entry.grad_norms,
        weights={1: dict.fromkeys(entry.weights, 0.0)},
    )
    assert (found.verdict, found.step) == ("different", 0)


def test_a_layout_that_fails_says_why_and_the_others_go_on(ranks):
    ranks.run(spoil_gradients, 1, WRONG_PARAMETER, float("nan"))
    try:
        result = compared(ranks, ["dp2", "tp2 m2"])
    finally:
        ranks.run(mend_gradients)
    for optimizer in ("adamw", "sgd"):
        failed = result.entry("dp2", optimizer)
        assert failed.verdict == "failed"
        assert "gradient norm is nan at step 1" in failed.why
        assert "Traceback" not in failed.why
        assert result.entry("tp2 m2", optimizer).is_good
    assert not result.passed


class WithLittleTimeForPipelines:
    """Ranks whose pipelines get half a second; all else gets what it is given."""

    def __init__(self, ranks):
        self._ranks = ranks

    def __getattr__(self, name):
        return getattr(self._ranks, name)

    def __len__(self):
        return len(self._ranks)

    def run(self, function, *args, timeout_s):
        is_pipeline = len(args) > 1 and args[1].layout.pp > 1
        return self._ranks.run(function, *args, timeout_s=0.5 if is_pipeline else timeout_s)


def hang_in_pipelines():
    """Runs on a rank: pipelines never end."""
    import time

    from labkit.rank import pipeline_parallel

    def wrong(self, *args):
        time.sleep(3600)

    pipeline_parallel.right = pipeline_parallel.Pipeline.__call__
    pipeline_parallel.Pipeline.__call__ = wrong


def mend_pipelines():
    from labkit.rank import pipeline_parallel

    pipeline_parallel.Pipeline.__call__ = pipeline_parallel.right


def test_a_layout_that_does_not_end_is_freed_and_the_others_go_on(ranks):
    ranks.run(hang_in_pipelines)
    try:
        result = compared(WithLittleTimeForPipelines(ranks), ["pp2 m2", "tp2 m2"], num_steps=1)
    finally:
        ranks.run(mend_pipelines)
    assert [entry.verdict for entry in result.entries[:2]] == ["failed"] * 2
    assert "did not finish compare within 0.5 s" in result.entries[0].why
    assert all(entry.is_good for entry in result.entries[2:])


def test_a_lost_rank_ends_it_with_what_is_there(own_ranks):
    own_ranks.run(die_in_pipelines)
    result = compared(own_ranks, ["dp2 m2", "pp2 m4", "tp2 m4"], num_steps=2)
    assert [entry.verdict for entry in result.entries] == [*["within rounding"] * 2, "failed", *["not run"] * 3]
    assert "rank 1" in result.entries[2].why
    assert result.entries[-1].why == result.entries[2].why
    with pytest.raises(ClusterError, match=r"rank 1 of 4 is gone"):
        compared(own_ranks, ["dp2"])


def die_in_pipelines():
    """Runs on a rank: rank 1 dies in the first pipeline that trains."""
    import os
    import signal

    import torch.distributed as dist

    from labkit.rank import pipeline_parallel

    right = pipeline_parallel.Pipeline.__call__

    def wrong(self, *args):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return right(self, *args)

    pipeline_parallel.Pipeline.__call__ = wrong


def test_the_line_says_how_far_it_is_and_how_it_came_out(ranks, capsys):
    compared(ranks, ["dp2"], num_steps=1, progress=True)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "1 layout under adamw and sgd against one rank ('b2') over 1 step" in out


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        (["dp4 b3", "dp2 pp2 m4"], r"^'dp4 b3' takes 12 samples .* 'dp2 pp2 1f1b m4' 8: .* Use 'dp2 pp2 1f1b m6'\.$"),
        (["dp2 b4", "dp2 m2"], r"'dp2 b4' takes 8 samples .* and 'dp2 m2' 4: .* Use 'dp2 m4' or 'dp2 m2 b2'\."),
        (["dp3", "dp2 m2"], r"takes 3 samples .* 4: .* Use 'dp3 b4' and 'dp2 m2 b3', 12 samples each\.$"),
        (["dp8 b3"], r"dp\(8\) \* pp\(1\) \* tp\(1\) = 8 but 4 ranks are up"),
        (["dp2", "tp3 b2"], r"num_heads=4 is not divisible by tp=3"),
        (["dp2", "nonsense"], r"'nonsense' is not a layout token"),
        ([], r"layouts=\[\] names no layout"),
        (3, r"layouts 3 is no list"),
        (["dp2", 3], r"3 among layouts is of type int: a layout is compared\. Give 'dp2', Layout\(dp=2\) or a plan\."),
        ([own(IN_TURN), own(LAST_FIRST)], r"2 schedules of one's own under 'pp2 own m2 b2': .* Use 2 calls\."),
        ([lk.plan.build(OTHER, lk.spec.Layout())], r"the plan 'dp1' is of another model \(1 layer"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_before_anything_runs(ranks, layouts, message):
    calls = len(ranks.under_way())
    with pytest.raises(PlanError, match=message):
        compared(ranks, layouts)
    assert len(ranks.under_way()) == calls


def test_options_are_checked(ranks):
    for wrong in ({"num_steps": 0}, {"seed": -1}, {"data": ""}, {"progress": 1}):
        with pytest.raises(PlanError, match=next(iter(wrong))):
            lk.launch.parity(ranks, MODEL, ["dp2"], **wrong)
    with pytest.raises(PlanError, match="is no Model"):
        lk.launch.parity(ranks, "tiny", ["dp2"])
    with pytest.raises(PlanError, match=r"lk\.cluster\.start"):
        lk.launch.parity(MODEL, MODEL, ["dp2"])


def test_what_rank_0_cannot_keep_is_refused(ranks):
    with pytest.raises(PlanError, match=r"one rank's weights after each of 5 steps take [\d,.]+ GiB over 2 runs"):
        lk.launch.parity(ranks, lk.spec.Model.preset("llama3-70b"), ["dp2"])


def test_ranks_that_train_are_left_alone(ranks):
    run = lk.launch.train(ranks, lk.plan.build(MODEL, lk.spec.Layout.parse("dp2")), 100_000, block=False)
    try:
        with pytest.raises(ClusterError, match="still going on"):
            compared(ranks, ["dp2"])
    finally:
        run.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_ranks():
    """In `make test` like every other; all layouts of eight ranks: `python -m benchmarks.parity 8`."""
    layouts = ["dp2 tp2 pp2 m2 b2", "dp2 tp2 pp2 zero3 sp m2 b2", "dp2 tp2 pp2 zero1 zbv v2 m2 b2 recompute:full"]
    with lk.cluster.start(8, backend="gloo") as eight:
        result = compared(eight, layouts)
    assert result.passed, str(result)
