"""DeepSpeed as an engine: trains as one rank does, sends what a stage says, goes on, fails clearly, leaves nothing."""

import os
import pathlib
import re
import sys

import cloudpickle
import pytest

import labkit as lk
from labkit import compiled
from labkit.errors import PlanError, RankError
from tests.ranks import waits

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])

MODEL = lk.spec.Model(num_layers=2, d_model=32, num_heads=4, vocab_size=256, seq_len=16)
TIED = lk.spec.Model(
    num_layers=2, d_model=32, num_heads=4, vocab_size=256, seq_len=16, tied_embeddings=True, position="learned",
    norm="layer", activation="gelu", bias=True,
)  # fmt: skip
SGD = {"optimizer": "sgd", "learning_rate": 0.1, "clip_norm": 0.5}
ALL = 4 * MODEL.num_parameters

# 8 samples a step in each.
LAYOUTS = ["dp4 zero1 b2", "dp2 zero2 m2 b2", "dp4 zero3 m2 b1", "dp2 pp2 zero1 deepspeed m2 b2"]
OFFLOADED = ["dp2 zero1 offload:optimizer m2 b2", "dp2 zero3 offload:all b4"]
FURTHER = [
    "dp4 deepspeed m2 b1",
    "pp2 deepspeed m4 b2",
    "dp2 pp2 deepspeed m1 b4 recompute:full",
    "dp2 zero1 m4 b1",
    "dp4 zero2 b2",
    "dp3 zero3 m1 b8",
    "dp1 zero3 deepspeed b8",
    "dp2 zero2 recompute:full b4",
    "dp2 zero3 recompute:selective m2 b2",
]
FURTHER_OFFLOADED = [
    "dp2 zero2 offload:optimizer b4",
    "dp4 zero3 offload:optimizer m2 b1",
    "dp1 zero1 offload:optimizer b8",
]


def plan_of(text: str, model: lk.spec.Model = MODEL) -> lk.plan.Plan:
    plan = lk.plan.build(model, lk.spec.Layout.parse(text))
    assert plan.engine == "deepspeed"
    return plan


def trained(ranks: lk.cluster.Ranks, text: str, num_steps: int = 2, **options: object) -> lk.launch.Run:
    return lk.launch.train(ranks, plan_of(text), num_steps=num_steps, progress=False, **options)


def compare(ranks: lk.cluster.Ranks, layouts: list[str], model: lk.spec.Model = MODEL) -> None:
    for batch in sorted({lk.spec.Layout.parse(text).global_batch_size for text in layouts}):
        group = [text for text in layouts if lk.spec.Layout.parse(text).global_batch_size == batch]
        result = lk.launch.parity(ranks, model, [plan_of(text, model) for text in group], progress=False)
        assert result.passed, str(result)


def test_stages_train_as_one_rank_does(ranks: lk.cluster.Ranks) -> None:
    compare(ranks, LAYOUTS)


@pytest.mark.operations
def test_what_lives_in_host_memory_trains_as_one_rank_does(ranks: lk.cluster.Ranks) -> None:
    compare(ranks, OFFLOADED)


@pytest.mark.slow
def test_further_layouts_train_as_one_rank_does(ranks: lk.cluster.Ranks) -> None:
    compare(ranks, FURTHER)


@pytest.mark.slow
@pytest.mark.operations
def test_further_layouts_in_host_memory_train_as_one_rank_does(ranks: lk.cluster.Ranks) -> None:
    compare(ranks, FURTHER_OFFLOADED)


@pytest.mark.slow
def test_bf16_stays_in_its_band(ranks: lk.cluster.Ranks) -> None:
    compare(ranks, ["dp2 zero1 bf16 b4", "dp4 zero3 bf16 m2 b1", "pp2 zero1 deepspeed bf16 m2 b4"])


@pytest.mark.slow
def test_a_shared_matrix_biases_and_learned_positions_are_sharded_too(ranks: lk.cluster.Ranks) -> None:
    compare(ranks, ["dp2 zero3 m2 b2", "dp2 zero2 b4"], TIED)


def test_each_stage_communicates_what_it_says(ranks: lk.cluster.Ranks) -> None:
    """ZeRO-1 and 2 add up whole gradients, which DeepSpeed does by all-reduces; ZeRO-3 gathers twice a micro-batch."""
    norm = 4
    expected = {
        "dp2 zero1 m2": {"all_reduce": ALL + norm, "all_gather": ALL},
        "dp2 zero2 m2": {"all_reduce": 2 * ALL + norm, "all_gather": ALL},
        "dp2 zero3 m2": {"all_reduce": 2 * norm, "all_gather": 4 * ALL, "reduce_scatter": 2 * ALL},
    }
    for text, kinds in expected.items():
        run = trained(ranks, text)
        for rank in range(2):  # in its first step ZeRO-3 also compares the order of the modules
            found: dict[str, int] = {}
            for event in run.trace.of_step(1).of_rank(rank).events:
                if event.group == "dp":
                    found[event.kind] = found.get(event.kind, 0) + event.num_bytes
            assert found == kinds, text
        kinds_seen = [event.kind for event in run.trace.of_step(1).of_rank(0).events]
        assert kinds_seen.count("F") == kinds_seen.count("B") == 2
        assert kinds_seen.count("optimizer") == 1


@pytest.mark.parametrize("text", ["dp2 zero1 m2 b2", "dp2 zero3 b4"])
def test_a_run_goes_on_as_if_it_had_not_been_left(ranks: lk.cluster.Ranks, text: str) -> None:
    whole = trained(ranks, text, 4, **SGD)
    first = trained(ranks, text, 2, **SGD)
    second = trained(ranks, text, 2, **SGD, start="live")
    assert first.losses + second.losses == whole.losses
    assert first.grad_norms + second.grad_norms == whole.grad_norms


def test_a_run_that_goes_on_takes_its_own_rate_and_clipping(ranks: lk.cluster.Ranks) -> None:
    other = {"optimizer": "sgd", "learning_rate": 0.02, "clip_norm": 0.1}
    losses = {}
    for engine in ("deepspeed", "torch"):
        plan = lk.plan.build(MODEL, lk.spec.Layout.parse(f"dp2 zero1 b4 {engine}"))
        lk.launch.train(ranks, plan, num_steps=2, progress=False, **SGD)
        losses[engine] = lk.launch.train(ranks, plan, num_steps=3, progress=False, start="live", **other).losses
    assert losses["deepspeed"] == pytest.approx(losses["torch"], rel=1e-5)


def test_it_trains_again_after_an_interrupt(ranks: lk.cluster.Ranks) -> None:
    before = trained(ranks, "dp4 zero3 b2").losses
    ranks.run(waits.barrier, block=False)
    ranks.interrupt()
    with pytest.raises(RankError, match=r"there is no live training state: the ranks' groups were built anew"):
        trained(ranks, "dp4 zero3 b2", start="live")
    assert trained(ranks, "dp4 zero3 b2").losses == before


def test_a_run_is_stopped_and_the_ranks_train_on(ranks: lk.cluster.Ranks) -> None:
    run = trained(ranks, "dp4 zero3 b2", 10_000, block=False)
    while not run.poll().losses:
        pass
    run.stop()
    assert run.wait().losses
    assert trained(ranks, "dp2 zero2 b4").losses


def test_numbers_out_of_range_are_a_clear_error(ranks: lk.cluster.Ranks) -> None:
    for text in ("dp2 zero1 b2", "dp4 zero3 b1"):
        with pytest.raises(RankError) as caught:
            trained(ranks, text, 30, optimizer="sgd", learning_rate=1e30, clip_norm=None)
        told = str(caught.value)
        assert re.search(r"(loss|gradient norm) is (nan|inf) at step \d+.*learning_rate=1e\+30", told), told
    assert trained(ranks, "dp2 zero1 b2").losses


def spoil_gradients() -> None:
    """Runs on a rank: from now on no gradient is a number, and the weights are remembered."""
    from labkit.rank import state

    engine = state.current().weights.engine
    backward = engine.backward
    engine.backward = lambda loss: backward(loss * float("nan"))
    kept = [getattr(one, "ds_tensor", one) for one in engine.module.parameters()]
    state.seen = [(one, one.detach().clone()) for one in kept]


def kept_weights() -> bool:
    from labkit.rank import state

    seen = state.seen
    del state.seen
    return all((one == before).all().item() for one, before in seen)


@pytest.mark.parametrize("text", ["dp4 zero1 b2", "dp4 zero3 b2"])
def test_gradients_that_are_no_numbers_leave_the_weights(ranks: lk.cluster.Ranks, text: str) -> None:
    """DeepSpeed tells the norm with the update, which it must not have made then."""
    trained(ranks, text)
    ranks.run(spoil_gradients)
    with pytest.raises(RankError, match=r"gradient norm is (nan|inf) at step 2"):
        trained(ranks, text, start="live")
    assert ranks.run(kept_weights) == [True] * 4


def test_an_operation_that_is_not_there_is_told_in_seconds(ranks: lk.cluster.Ranks) -> None:
    def hide() -> None:
        from labkit import compiled

        compiled.right, compiled.why_not = compiled.why_not, lambda name: "it is not in /somewhere"  # type: ignore[attr-defined]

    def show() -> None:
        from labkit import compiled

        compiled.why_not = compiled.right  # type: ignore[attr-defined]

    ranks.run(hide)
    try:
        with pytest.raises(RankError, match=r"cpu_adam cannot be used: it is not in /somewhere.*`labkit compile`"):
            trained(ranks, "dp2 zero1 offload:optimizer b4")
    finally:
        ranks.run(show)


def loads_anew_from(folder: str | None) -> None:
    """Have this rank take DeepSpeed's operations from another folder, or from its own again."""
    from labkit import compiled
    from labkit.rank import deepspeed_library

    if folder is not None:
        compiled.right, compiled.library = compiled.library, lambda name: pathlib.Path(folder) / f"{name}.so"  # type: ignore[attr-defined]
    else:
        compiled.library = compiled.right  # type: ignore[attr-defined]
    deepspeed_library.load()
    builder = sys.modules["deepspeed.ops.op_builder.builder"].OpBuilder  # type: ignore[attr-defined]
    builder._loaded_ops.pop("cpu_adam", None)
    deepspeed_library.load()


@pytest.mark.operations
def test_a_damaged_operation_ends_no_rank_and_only_layouts_that_need_it_fail(
    ranks: lk.cluster.Ranks, tmp_path: pathlib.Path
) -> None:
    """Loaded all the same, a library that was cut short ends the process by SIGBUS."""
    damaged = tmp_path / "cpu_adam.so"
    whole = compiled.library("cpu_adam").read_bytes()
    other = compiled.library("deepspeed_shm_comm").read_bytes()
    for content, why in (
        (whole[: len(whole) // 2], r"cpu_adam\.so is cut short"),
        (other, r"cpu_adam\.so cannot be loaded \(.*\); remove it"),
    ):
        damaged.write_bytes(content)
        ranks.run(loads_anew_from, str(tmp_path))
        try:
            assert trained(ranks, "dp2 zero1 b4").losses
            with pytest.raises(RankError, match=rf"cpu_adam cannot be used: .*{why}\. AdamW in host memory needs it"):
                trained(ranks, "dp2 zero1 offload:optimizer b4")
        finally:
            ranks.run(loads_anew_from, None)
    assert trained(ranks, "dp2 zero1 offload:optimizer b4").losses


def test_it_says_nothing_and_keeps_nothing(ranks: lk.cluster.Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    def usage() -> tuple[int, int, list[str]]:
        import gc

        gc.collect()
        tasks, descriptors = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")
        return len(tasks), len(descriptors), [one for one in os.listdir("/dev/shm") if "deepspeed" in one]

    seen = []
    for text in ("dp4 zero3 b2", "dp2 zero1 b4", "dp4 zero3 b2", "dp2 zero1 b4"):
        trained(ranks, text)
        seen.append(ranks.run(usage))
    assert capfd.readouterr() == ("", "")
    for earlier, later in zip(seen[1], seen[3], strict=True):
        assert later[0] <= earlier[0]
        assert later[1] <= earlier[1]
        assert later[2] == []


def name_of_linear() -> str:
    import torch

    return torch.nn.functional.linear.__name__


def put_in_another_linear() -> str:
    """As ZeRO-3 does in the process of a learner who initialises DeepSpeed by hand."""
    import torch

    from labkit.rank import deepspeed_library

    deepspeed_library.load()
    from deepspeed.runtime.zero import partition_parameters

    partition_parameters.InsertPostInitMethodToModuleSubClasses.linear_bk = torch.nn.functional.linear
    torch.nn.functional.linear = partition_parameters.zero3_linear_wrap
    return name_of_linear()


def test_torch_keeps_its_linear(ranks: lk.cluster.Ranks) -> None:
    """DeepSpeed's ZeRO-3 would put another in its place, for everything in the process."""
    trained(ranks, "dp2 zero3 b4")
    assert ranks.run(name_of_linear) == ["linear"] * 4


def test_ranks_that_differ_in_what_deepspeed_put_into_torch_train_as_one_rank_does(ranks: lk.cluster.Ranks) -> None:
    """Gradients would come in another order on rank 0, and ZeRO-2 would add up those of different parameters."""
    assert ranks.run(put_in_another_linear, ranks=[0]) == ["zero3_linear_wrap"]
    compare(ranks, ["dp2 zero2 b4"], TIED)
    assert ranks.run(name_of_linear) == ["linear"] * 4


def test_its_pipeline_follows_the_schedule_of_the_plan(ranks: lk.cluster.Ranks) -> None:
    run = trained(ranks, "pp2 deepspeed m4 b2")
    for rank, actions in enumerate(run.plan.actions):
        events = [one for one in run.trace.of_step(1).of_rank(rank).events if one.kind in ("F", "B")]
        assert [one.label for one in events] == [str(action) for action in actions]
        messages = [one for one in run.trace.of_step(1).of_rank(rank).events if one.peer is not None]
        assert {one.num_bytes for one in messages} == {2 * 16 * 32 * 4}
        assert sorted(one.kind for one in messages) == sorted((["SEND_F", "RECV_B"], ["RECV_F", "SEND_B"])[rank] * 4)
        assert {one.peer for one in messages} == {1 - rank}


def test_collectives_of_its_pipeline_go_by_their_axis(ranks: lk.cluster.Ranks) -> None:
    run = trained(ranks, "dp2 pp2 zero1 deepspeed m2 b2")
    for rank in range(4):
        events = run.trace.of_step(1).of_rank(rank).events
        stage_bytes = 4 * run.plan.num_parameters(rank)
        found = sorted((one.group, one.kind, one.num_bytes) for one in events if one.group and one.peer is None)
        gradients, weights = ("dp", "all_reduce", stage_bytes), ("dp", "all_gather", stage_bytes)
        norms = [("dp", "all_reduce", 4), ("pp", "all_reduce", 4)]
        assert found == sorted([gradients, weights, *norms, ("world", "all_reduce", 24)])


def test_the_live_state_goes_to_its_pipeline_and_on(ranks: lk.cluster.Ranks) -> None:
    whole = trained(ranks, "dp2 zero1 b4", 4).losses
    losses = trained(ranks, "dp2 zero1 b4", 2).losses
    for text in ("dp2 pp2 zero1 deepspeed m2 b2", "dp4 zero3 b2"):
        lk.launch.switch(ranks, plan_of(text), progress=False)
        losses += trained(ranks, text, 1, start="live").losses
    assert losses == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "model", "why"),
    [
        ("dp4 zero3 hybrid2 deepspeed", MODEL, "hybrid with engine='deepspeed': only torch shards so"),
        ("dp2 tp2 deepspeed", MODEL, "its tensor parallel knows only other models"),
        ("dp2 pp2 zero2 deepspeed", MODEL, "its pipeline runs ZeRO 0 and 1"),
        ("pp2 gpipe deepspeed", MODEL, "its pipeline runs 1f1b"),
        ("pp2 deepspeed", TIED, "its pipeline shares whole layers, not their matrices"),
    ],
)
def test_what_it_does_not_run_is_refused_with_the_nearest(text: str, model: lk.spec.Model, why: str) -> None:
    with pytest.raises(PlanError, match=why) as caught:
        plan_of(text, model)
    nearest = re.search(r"Use '([^']+)'", str(caught.value))
    assert nearest is not None
    lk.plan.build(model, lk.spec.Layout.parse(nearest[1]))
