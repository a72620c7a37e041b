"""Plans as DeepSpeed, Megatron-LM and torchtitan read them."""

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import labkit as lk
from labkit.errors import PlanError
from labkit.plan import Plan

MODEL = lk.spec.Model.preset("tiny")


def plan_of(text, model=MODEL):
    """A plan, also of layouts that ranks do not run yet: an export is of the value alone."""
    return Plan(model=model, layout=lk.spec.Layout.parse(text))


@st.composite
def layouts(draw):
    stage = draw(st.integers(0, 3))
    offloads = ["none", "optimizer", "all"][: 1 + min(stage, 1) + (stage == 3)]
    return lk.spec.Layout(
        dp=draw(st.sampled_from([1, 2, 3, 8])),
        tp=draw(st.sampled_from([1, 2])),
        pp=draw(st.sampled_from([1, 2])),
        zero_stage=stage,
        num_microbatches=draw(st.integers(1, 9)),
        microbatch_size=draw(st.integers(1, 9)),
        precision=draw(st.sampled_from(["fp32", "bf16"])),
        offload=draw(st.sampled_from(offloads)),
    )


@given(layouts())
def test_deepspeed_there_and_back(layout):
    config = json.loads(json.dumps(lk.export.deepspeed(Plan(model=MODEL, layout=layout))))
    said = lk.plan.from_deepspeed(config, MODEL, layout.world_size)
    assert said.layout == layout
    is_refused = layout.pp > 1 and layout.zero_stage >= 2
    assert [one.path for one in said.mistakes] == ["zero_optimization.stage"] * is_refused
    assert any("pipeline" in one for one in config.get("_notes", [])) is (layout.pp > 1)
    assert any("refuses ZeRO" in one for one in config.get("_notes", [])) is is_refused


def test_deepspeed_optimizer_and_clipping():
    training = lk.spec.Training(num_steps=3, optimizer="sgd", learning_rate=0.1, weight_decay=0.0, clip_norm=None)
    config = lk.export.deepspeed(plan_of("dp2 zero2"), training=training)
    assert config["optimizer"] == {"type": "SGD", "params": {"lr": 0.1, "weight_decay": 0.0}}
    assert (config["gradient_clipping"], config["zero_allow_untested_optimizer"]) == (0.0, True)
    assert "_notes" not in config
    adam = lk.export.deepspeed(plan_of("dp2"))["optimizer"]["params"]
    assert adam == {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "torch_adam": True}


def test_what_has_no_counterpart_is_noted():
    plan = plan_of("dp2 tp2 pp2 zero1 interleaved v2 m8 fp8 sp recompute:full")
    notes = " ".join(lk.export.deepspeed(plan)["_notes"])
    for word in (
        "PipelineModule",
        "interleaved",
        "one stage a rank",
        "AutoTP",
        "Sequence parallel",
        "recompute",
        "FP8",
    ):
        assert word in notes
    assert "hybrid=2" in " ".join(lk.export.deepspeed(plan_of("dp4 zero3 hybrid2"))["_notes"])


def option(arguments, name):
    return arguments[arguments.index(f"--{name}") + 1]


def test_megatron_arguments():
    model = lk.spec.Model.preset("llama3-8b")
    arguments = lk.export.megatron(plan_of("dp2 tp4 pp2 zero1 interleaved v2 m8 bf16 sp recompute:selective", model))
    wanted = {
        "num-layers": "32",
        "hidden-size": "4096",
        "ffn-hidden-size": "14336",
        "num-query-groups": "8",
        "seq-length": "8192",
        "rotary-base": "500000",
        "normalization": "RMSNorm",
        "tensor-model-parallel-size": "4",
        "pipeline-model-parallel-size": "2",
        "num-virtual-stages-per-pipeline-rank": "2",
        "micro-batch-size": "1",
        "global-batch-size": "16",
        "recompute-granularity": "selective",
        "optimizer": "adam",
        "lr": "0.001",
    }
    assert {name: option(arguments, name) for name in wanted} == wanted
    flags = {"--bf16", "--use-distributed-optimizer", "--sequence-parallel", "--swiglu", "--disable-bias-linear"}
    assert flags <= set(arguments)
    assert all(isinstance(one, str) for one in arguments)
    assert len({one for one in arguments if one.startswith("--")}) == sum(one.startswith("--") for one in arguments)


def test_megatron_of_a_gpt2():
    arguments = lk.export.megatron(plan_of("dp2", lk.spec.Model.preset("gpt2-124m")))
    assert option(arguments, "position-embedding-type") == "learned_absolute"
    assert not {"--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--bf16"} & set(arguments)


def test_megatron_notes_and_lines():
    arguments = lk.export.megatron(plan_of("pp3 gpipe zero3 m3 offload:all fp8"))
    text = str(arguments)
    assert text.startswith("# Start 3 ranks: 3 / (tp 1 * pp 3) = dp 1.\n")
    for word in ("not gpipe", "4 layers are not divisible by 3 stages", "Parameters cannot be offloaded"):
        assert word in text
    assert "--fp8-format hybrid \\\n" in text
    assert option(arguments, "data-parallel-sharding-strategy") == "optim_grads_params"


def test_torchtitan_settings():
    plan = plan_of("dp4 tp2 pp2 zero3 hybrid2 gpipe m8 b2 bf16 recompute:selective")
    settings = tomllib.loads(lk.export.torchtitan(plan, training=lk.spec.Training(num_steps=5, seed=3)))
    assert settings["parallelism"] == {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "context_parallel_degree": 1,
        "fsdp_reshard_after_forward": "always",
        "pipeline_parallel_schedule": "GPipe",
        "pipeline_parallel_microbatch_size": 2,
    }
    training = settings["training"]
    assert (training["local_batch_size"], training["global_batch_size"], training["seq_len"]) == (16, 64, 128)
    assert (training["steps"], settings["debug"]["seed"]) == (5, 3)
    assert settings["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}


def test_torchtitan_accumulates_without_a_pipeline():
    settings = tomllib.loads(lk.export.torchtitan(plan_of("dp2 m4 b3")))
    assert (settings["training"]["local_batch_size"], settings["training"]["global_batch_size"]) == (3, 24)
    assert settings["training"]["mixed_precision_param"] == "float32"


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        ("dp2 zero1", "ZeRO 1"),
        ("tp2", "splits the sequence"),
        ("dp2 zero3 offload:optimizer", "alone"),
        ("fp8", "torchao"),
        ("pp2 own m1", "pipeline_parallel_schedule_csv"),
    ],
)
def test_torchtitan_comments(layout, word):
    lines = lk.export.torchtitan(plan_of(layout)).splitlines()
    assert any(word in line for line in lines if line.startswith("# "))


@given(layouts())
def test_every_export_of_every_layout_can_be_read(layout):
    plan = Plan(model=MODEL, layout=layout)
    parallel = tomllib.loads(lk.export.torchtitan(plan))["parallelism"]
    assert parallel["data_parallel_replicate_degree"] * parallel["data_parallel_shard_degree"] == layout.dp
    assert option(lk.export.megatron(plan), "global-batch-size") == str(layout.global_batch_size)


DELAYED = lk.spec.Fp8(history=16, amax="most_recent", margin=1, format="e4m3")


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [
        (
            DELAYED,
            "--fp8-format e4m3 --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo most_recent "
            "--fp8-margin 1",
        ),
        (
            None,
            "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max "
            "--fp8-margin 0",
        ),
        (lk.spec.Fp8(recipe="current"), "--fp8-format hybrid --fp8-recipe tensorwise"),
        (lk.spec.Fp8(recipe="block"), "--fp8-format e4m3 --fp8-recipe blockwise"),
    ],
)
def test_megatron_gets_the_recipe_that_was_asked_for(recipe, wanted):
    text = " ".join(lk.export.megatron(plan_of("dp2 m2 fp8"), fp8=recipe))
    assert wanted in text
    assert text.count("--fp8") == wanted.count("--fp8")
    by_training = lk.export.megatron(plan_of("dp2 m2 fp8"), training=lk.spec.Training(num_steps=1, fp8=recipe))
    assert " ".join(by_training) == text
    notes = " ".join(by_training.notes)
    assert ("not on steps" in notes) is ("delayed" in wanted)


@pytest.mark.parametrize(
    ("recipe", "name", "notes"),
    [
        (DELAYED, "tensorwise", ["Delayed scaling has no counterpart", "E5M2 for gradients"]),
        (lk.spec.Fp8(recipe="current"), "tensorwise", []),
        (lk.spec.Fp8(recipe="block"), "rowwise", ["Block scaling has no counterpart"]),
        (lk.spec.Fp8(recipe="block", format="hybrid"), "rowwise", ["Block scaling", "Rowwise is E4M3"]),
    ],
)
def test_torchtitan_gets_the_nearest_recipe_and_says_what_differs(recipe, name, notes):
    text = lk.export.torchtitan(plan_of("fp8"), fp8=recipe)
    assert tomllib.loads(text)["quantize"]["linear"]["float8"] == {"recipe_name": name}
    said = [line for line in text.splitlines() if "counterpart" in line or "gradients" in line]
    assert len(said) == len(notes)
    assert all(note in line for note, line in zip(notes, said, strict=True))


def test_deepspeed_notes_the_recipe():
    (note,) = lk.export.deepspeed(plan_of("fp8"), fp8=DELAYED)["_notes"]
    assert "would cast by Fp8(recipe='delayed', format='e4m3', history=16" in note


@pytest.mark.parametrize("export", [lk.export.deepspeed, lk.export.megatron, lk.export.torchtitan])
def test_a_recipe_is_checked(export):
    with pytest.raises(PlanError, match="fp8='block' is no Fp8"):
        export(plan_of("fp8"), fp8="block")
    with pytest.raises(PlanError, match="with precision='bf16': nothing is cast to FP8 there"):
        export(plan_of("bf16"), fp8=DELAYED)


@pytest.mark.parametrize("export", [lk.export.deepspeed, lk.export.megatron, lk.export.torchtitan])
def test_what_is_no_plan_is_refused(export):
    with pytest.raises(PlanError, match="plan='dp2' is no Plan"):
        export("dp2")
    with pytest.raises(PlanError, match="training=3 is no Training"):
        export(plan_of("dp2"), training=3)
