"""A DeepSpeed configuration read, judged and turned into a plan."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import labkit as lk
from labkit.configuration.known import KEYS
from labkit.errors import PlanError

MICRO = {"train_micro_batch_size_per_gpu": 1}


def zero(stage, **others):
    return {"zero_optimization": {"stage": stage, **others}}


def explained(config, model=None, world_size=None, **context):
    if context:
        config = {"_context": context} | config
    return lk.plan.from_deepspeed(config, model, world_size)


def found(config, severity="mistake", **arguments):
    """path -> message of the findings of a severity."""
    said = explained(config, **arguments)
    return {one.path: one.message for one in said.findings if one.severity == severity}


def test_a_right_configuration_becomes_a_plan():
    config = {"train_batch_size": 32, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    said = explained(config, model="tiny", world_size=4)
    assert (str(said.layout), said.mistakes, said.why_no_plan) == ("dp4 m2 b4", (), "")
    assert said.plan == lk.plan.build(lk.spec.Model.preset("tiny"), said.layout)
    values = {one.path: (one.value, one.is_given) for one in said.fields}
    assert values["train_micro_batch_size_per_gpu"] == ("4", False)
    assert values["train_batch_size"] == ("32", True)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (MICRO | zero(3) | {"bf16": {"enabled": True}}, "dp4 zero3 bf16"),
        (MICRO | zero(2, cpu_offload=True), "dp4 zero2 offload:optimizer"),
        (
            MICRO | zero(3, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"}),
            "dp4 zero3 offload:all",
        ),
        (MICRO | {"tensor_parallel": {"autotp_size": 2}}, "dp2 tp2"),
        (MICRO | {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 8}, "dp2 pp2 1f1b m8"),
        ({"train_batch_size": 8, "bfloat16": {"enabled": "true"}}, "dp4 b2 bf16"),
    ],
)
def test_layout(config, layout):
    assert str(explained(config, world_size=4).layout) == layout


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MICRO, "no model is given."),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, "it gives no batch size in numbers."),
        (MICRO | {"fp16": {"enabled": True}}, "a layout is fp32, bf16 or fp8 and not fp16: bf16 stands for it here."),
        ({"train_batch_size": 6}, "its batch sizes do not multiply up."),
        (MICRO | {"zero_optimisation": {}}, "there is a mistake in it"),
    ],
)
def test_no_plan_says_why(config, why):
    said = explained(config, world_size=4)
    assert said.plan is None
    assert said.why_no_plan.startswith(why)


def test_batch_product_with_both_numbers_and_ways_out():
    said = explained({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2}, world_size=7)
    assert said.findings[0].message == (
        "train_batch_size=256 is not divisible by micro-batch 2 * 7 ranks = 14: 256 != 2 * 18 * 7 = 252: "
        "train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel ranks. "
        "Use train_batch_size=252 or 266, or 4 or 8 data-parallel ranks instead of 7."
    )


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.integers(1, 4096))
def test_batch_is_judged_as_deepspeed_judges_it(micro, steps, ranks, total):
    config = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    is_right = total == micro * steps * ranks
    assert ("train_batch_size" in found(config, world_size=ranks)) is not is_right
    config["train_batch_size"] = micro * steps * ranks
    assert explained(config, world_size=ranks).layout.global_batch_size == micro * steps * ranks
    del config["gradient_accumulation_steps"]
    config["train_batch_size"] = total
    assert ("train_batch_size" in found(config, world_size=ranks)) is not (total % (micro * ranks) == 0)


def test_ranks_that_a_batch_allows():
    note = found({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}, "note")["train_batch_size"]
    assert note.endswith("the number of data-parallel ranks must divide it: 1, 2, 3, 6.")
    only = found({"train_batch_size": 16, **MICRO, "gradient_accumulation_steps": 2}, "note")["train_batch_size"]
    assert only == "16 / (1 * 2) = 8: it fits 8 data-parallel ranks only."


MISTAKES = [
    # path, configuration, what the message says (G1 to G15, and what people ask about)
    (
        "zero_optimization.reduce_bucket",
        zero(2, reduce_bucket=5e8),
        "Did you mean zero_optimization.reduce_bucket_size?",
    ),
    ("zero_optimisation", {"zero_optimisation": {"stage": 2}}, "Did you mean zero_optimization?"),
    ("gradient_acumulation_steps", {"gradient_acumulation_steps": 4}, "Did you mean gradient_accumulation_steps?"),
    ("cpu_offload", {"cpu_offload": True}, "Move it into zero_optimization"),
    ("zero_optimization.aio", zero(3, aio={"block_size": 1}), "Move it to the top: aio."),
    ("max_grad_norm", {"max_grad_norm": 1.0}, "DeepSpeed's name for it is gradient_clipping."),
    ("aio.thread_count", {"aio": {"thread_count": 2}}, "Write aio.intra_op_parallelism."),
    ("elasticity", {"elasticity": {"enabled": True}}, "Elastic training is gone"),
    ("fp16.enabled", {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "DeepSpeed refuses both"),
    ("bf16.loss_scale", {"bf16": {"enabled": True, "loss_scale": 0}}, "it belongs to fp16"),
    ("bf16", {"bf16": True}, "Write {'enabled': true}"),
    ("train_batch_size", {"train_batch_size": "32"}, "Write 32 without quotes."),
    ("wall_clock_breakdown", {"wall_clock_breakdown": "false"}, "Write false without quotes."),
    ("zero_optimization.stage", zero(5), "the stages of ZeRO are 0, 1, 2 and 3"),
    ("zero_optimization.stage3_prefetch_bucket_size", zero(3, stage3_prefetch_bucket_size=11560550.4), "0.9 * 3584^2"),
    (
        "zero_optimization.offload_param",
        zero(2, offload_param={"device": "cpu"}),
        "they stay on the GPU without a word",
    ),
    ("zero_optimization.offload_optimizer", zero(0, offload_optimizer={"device": "cpu"}), "stages 1, 2 and 3"),
    ("zero_optimization.offload_optimizer.nvme_path", zero(3, offload_optimizer={"device": "nvme"}), "Set nvme_path."),
    (
        "zero_optimization.offload_optimizer",
        zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/x"}),
        "nothing goes to the disk",
    ),
    (
        "zero_optimization.offload_optimizer.ratio",
        zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        "stage 3",
    ),
    ("prescale_gradients", zero(2) | {"prescale_gradients": True}, "set reduce_scatter to false"),
    ("zero_allow_untested_optimizer", zero(2) | {"optimizer": {"type": "SGD"}}, "untested ZeRO Optimizer"),
    ("optimizer.type", {"optimizer": {"type": "AdanW"}}, "Did you mean AdamW?"),
    ("optimizer.type", {"optimizer": {"type": "OneBitAdam"}}, "1-bit optimizers are gone"),
    ("optimizer.params.max_grad_norm", {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "to the top"),
    ("optimizer.params.learning_rate", {"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}}, "mean lr?"),
    ("optimizer.params.lr", {"optimizer": {"type": "Adam", "params": {"lr": "1e-4"}}}, "without quotes"),
    ("scheduler.params.total_num_steps", {"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "missing argument"),
    ("scheduler.params.warmup_steps", {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}}, "num_steps?"),
    ("scheduler.type", {"scheduler": {"type": "WarmUpDecay"}}, "Did you mean WarmupDecayLR?"),
    (
        "checkpoint.load_dir",
        {"checkpoint": {"load_dir": "/ckpt/global_step1000"}},
        "load_dir='/ckpt' and tag='global_step1000'",
    ),
    ("data_types.grad_accum_dtype", {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "stage 1"),
    ("zero_optimization.cpu_offload", zero(2, cpu_offload=True, offload_optimizer={"device": "cpu"}), "Drop"),
]


@pytest.mark.parametrize(
    ("path", "config", "says"), MISTAKES, ids=[f"{path}-{index}" for index, (path, *_) in enumerate(MISTAKES)]
)
def test_mistakes_are_named_with_the_way_out(path, config, says):
    mistakes = found(MICRO | config)
    assert path in mistakes
    assert says in mistakes[path]
    assert mistakes[path].count("\n") == 0


def test_warmup_takes_the_place_of_the_optimizers_rate():
    config = MICRO | {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}},
    }
    assert "its default of 0.001" in found(config)["scheduler.params.warmup_max_lr"]
    config["scheduler"]["params"]["warmup_max_lr"] = 3e-4
    assert found(config) == {}
    assert "logarithmically" in found(config, "note")["scheduler.params.warmup_type"]


def test_buckets_count_elements():
    notes = found(MICRO | zero(2, reduce_bucket_size=5e8) | {"bf16": {"enabled": True}}, "note")
    assert notes["zero_optimization.reduce_bucket_size"].startswith(
        "reduce_bucket_size=500,000,000 elements = 1.0 GB in bf16"
    )
    field = next(one for one in explained(MICRO | zero(3)).fields if one.path.endswith("max_live_parameters"))
    assert (field.unit, field.is_given) == ("elements = 4.0 GB in fp32", False)


def test_offload_that_memory_does_not_ask_for():
    config = MICRO | zero(3, offload_optimizer={"device": "cpu"}) | {"bf16": {"enabled": True}}
    risk = found(config, "risk", model="llama2-7b", world_size=8)["zero_optimization.offload_optimizer"]
    assert "take 13.5 GB of state a GPU in stage 3 over 8 ranks" in risk
    assert "zero_optimization.offload_optimizer" not in found(config, "risk", model="llama3-405b", world_size=8)


def test_optimizer_offload_is_allowed_in_stage_1():
    said = explained(MICRO | zero(1, offload_optimizer={"device": "cpu", "pin_memory": False}))
    assert said.mistakes == ()
    assert "it is allowed" in str(said)


def test_a_clients_optimizer_under_offload():
    config = MICRO | zero(2, offload_optimizer={"device": "cpu"})
    assert found(config) == {}
    assert "DeepSpeedCPUAdam" in found(config, optimizer="torch.optim.AdamW")["optimizer"]
    assert found(config | {"zero_force_ds_cpu_optimizer": False}, optimizer="torch.optim.AdamW") == {}


def test_auto_depends_on_who_reads():
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
    assert "trains in float32" in found(config, "risk")["train_batch_size"]
    config |= {"gradient_accumulation_steps": "auto"} | zero(0)
    assert {one.severity for one in explained(config, launcher="HF Trainer").findings} <= {"note"}
    assert "compares text with a number" in found(config, launcher="deepspeed.initialize")["train_batch_size"]


@pytest.mark.parametrize(("hidden", "whole"), [(4096, 15099494), (3584, 11560550)])
def test_auto_prefetch_is_a_fraction(hidden, whole):
    config = zero(3, stage3_prefetch_bucket_size="auto") | {"train_batch_size": "auto"}
    said = found(config, launcher="HF Trainer", model_hidden_size=hidden, deepspeed="0.15.0")
    assert f"Set stage3_prefetch_bucket_size={whole}," in said["zero_optimization.stage3_prefetch_bucket_size"]
    assert found(config, launcher="HF Trainer", model_hidden_size=2560, deepspeed="0.15.0") == {}


def test_pipeline_refuses_zero_2():
    config = MICRO | zero(2)
    assert found(config) == {}
    assert "Use stage 1 (or 0)." in found(config, engine="deepspeed.pipe.PipelineModule")["zero_optimization.stage"]
    assert found(MICRO | zero(1), call="engine.train_batch() of a PipelineModule") == {}


def test_nvme_buffers_must_hold_the_largest_parameter():
    config = MICRO | zero(3, offload_param={"device": "nvme", "nvme_path": "/x"})
    path = "zero_optimization.offload_param.buffer_size"
    assert "buffer_size=131072000 or more" in found(config, model="llama2-7b", world_size=1)[path]
    assert path not in found(config, model="llama2-7b", world_size=8)


def test_what_deepspeed_said_is_explained():
    said = found(MICRO, error="AssertionError: ... world_size 16 != 2 * 1 * 1", world_size=4)
    assert "started" not in said
    said = found(MICRO, error="More elements 524550144 than buffer size 100,000,000")
    assert "NVMe buffer" in said["zero_optimization.offload_param.buffer_size"]
    said = found(MICRO, error="- ds fp16.enabled=True vs hf fp16|fp16_full_eval=False\n")
    assert said["fp16.enabled"].startswith("fp16.enabled=True, and fp16|fp16_full_eval=False")


def test_older_versions_ignored_what_newer_ones_refuse():
    config = MICRO | {"bf16": {"enabled": True, "hysteresis": 2}, "elasticity": {"enabled": True}}
    assert set(found(config)) == {"bf16.hysteresis", "elasticity"}
    del config["train_micro_batch_size_per_gpu"]
    assert found(config, deepspeed="0.14.2") == {}
    assert "computes the batch sizes" in found(config | MICRO, deepspeed="0.14.2")["elasticity"]
    assert {"bf16.hysteresis", "elasticity"} <= set(found(config, "risk", deepspeed="0.14.2"))


def test_fp8_is_no_setting_of_deepspeed():
    assert "the run is in bf16" in found(MICRO | {"fp8": {"enabled": True}, "bf16": {"enabled": True}})["fp8"]


def test_experts_under_stage_3_need_a_leaf():
    path = "zero_optimization.leaf_module"
    assert "set_z3_leaf_modules" in found(MICRO | zero(3), "risk", name="Qwen3-30B-A3B MoE")[path]
    assert path not in found(MICRO | zero(3, leaf_module={"classes": ["Block"]}), "risk", name="Mixtral")
    assert path not in found(MICRO | zero(2), "risk", name="Mixtral")


def test_what_is_left_out_beside_auto_stays_left_out():
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    assert "gradient_accumulation_steps" in found(config, "risk")
    assert "zero_optimization" in found(config, launcher="Accelerate")


def test_text_with_comments_is_read_as_deepspeed_reads_it():
    text = """
    // a comment
    {
      "train_batch_size": 8, # one more
      "fp16": {"enabled": false,}, /* and "one" */
    }
    """
    said = lk.plan.from_deepspeed(text, world_size=8)
    assert said.mistakes == ()
    assert any("Hjson" in one.message for one in said.findings)


def test_duplicate_keys_are_a_mistake():
    said = lk.plan.from_deepspeed('{"train_batch_size": 8, "train_batch_size": 16}')
    assert said.findings[0].fact == "'train_batch_size' stands 2 times, with 8 and 16"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "the text ends too early"),
        ("[1]", "the text is a list"),
        ('{"a": True}', "JSON writes true"),
        ("{'a': 1}", "double quotes"),
        ('{"a": 1 "b": 2}', "a comma or a colon is missing"),
        ('{"a": 1} {"b": 2}', "Keep one object"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 10_000 + "}", "a number cannot be read"),
        ("{" + " " * 2_000_001, "at most 2,000,000"),
    ],
)
def test_broken_text_says_where(text, says):
    with pytest.raises(PlanError, match=says):
        lk.plan.from_deepspeed(text)


def test_other_things_are_refused(tmp_path):
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for config, says in ((5, "is no configuration"), (tmp_path / "none.json", "cannot be read"), (binary, "UTF-8")):
        with pytest.raises(PlanError, match=says):
            lk.plan.from_deepspeed(config)
    with pytest.raises(PlanError, match="preset 'x' is unknown"):
        lk.plan.from_deepspeed({}, "x")
    with pytest.raises(PlanError, match="world_size=0"):
        lk.plan.from_deepspeed({}, world_size=0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("auto") | st.just("cpu"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from(sorted(KEYS)) | st.text(max_size=8), JSON, max_size=8),
    st.sampled_from([None, 1, 7]),
)
def test_whatever_stands_in_it_is_no_traceback(flat, world_size):
    config = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        place = config
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[name] = value
    said = lk.plan.from_deepspeed(config, "tiny", world_size)
    assert isinstance(str(said), str)
    assert said._repr_html_().startswith("<ul>")
    json.dumps(said.to_json())


def test_html_escapes_what_the_file_says():
    page = lk.plan.from_deepspeed({"<b>": "<script>"})._repr_html_()
    assert "<script>" not in page
