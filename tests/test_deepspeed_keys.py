"""The table of DeepSpeed's keys and the rules, against the installed library itself."""

import json
import pathlib
import subprocess
import sys

import pytest

import labkit as lk
from labkit.configuration.known import CLOSED, FREE, KEYS, REMOVED, RENAMED, VERSION
from labkit.plan import Plan

MICRO = {"train_micro_batch_size_per_gpu": 1}

GOOD = [
    MICRO,
    {"train_batch_size": 8},
    {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
    MICRO | {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": True}},
    MICRO | {"zero_optimization": {"stage": "3", "prefetch_bucket_size": 1000}, "bf16": {"enabled": "true"}},
    MICRO | {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": False}}},
    MICRO | {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}},
    MICRO | {"zero_optimization": {"stage": 2, "cpu_offload": True}},
    MICRO | {"zero_optimization": True},
    MICRO | {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2}},
    MICRO | {"bfloat16": {"enabled": True}},
    MICRO | {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}},
    MICRO | {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}}},
    MICRO | {"gradient_clipping": 0, "steps_per_print": 1e9, "wall_clock_breakdown": True},
    MICRO | {"checkpoint": {"tag_validation": "Fail"}, "communication_data_type": "FP32"},
    MICRO | {"tensor_parallel": {"autotp_size": 1}, "compile": {"deepcompile": False}},
    MICRO | {"_note": "DeepSpeed ignores this"},
]

EXPORTED = [
    lk.export.deepspeed(Plan(model=lk.spec.Model.preset("tiny"), layout=lk.spec.Layout.parse(text)))
    for text in (
        "dp1",
        "zero1 offload:optimizer m2 b3",
        "zero2 bf16",
        "zero3 offload:all bf16",
        "fp8 zero1 recompute:full",
    )
]

REFUSED = [
    {},
    {"gradient_accumulation_steps": 2},
    {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
    {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
    {"train_batch_size": 0},
    {"train_micro_batch_size_per_gpu": -2},
    {"train_batch_size": "32"},
    MICRO | {"zero_optimization": {"stage": 4}},
    MICRO | {"zero_optimization": {"stage": "two"}},
    MICRO | {"zero_optimization": 2},
    MICRO | {"zero_optimization": None},
    MICRO | {"zero_optimization": {"stage": 2, "reduce_bucketsize": 5e8}},
    MICRO | {"zero_optimization": {"stage": 3, "aio": {"block_size": 1}}},
    MICRO | {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 15099494.4}},
    MICRO | {"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}},
    MICRO | {"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}},
    MICRO | {"zero_optimization": {"stage": 2, "allgather_bucket_size": -1}},
    MICRO | {"zero_optimization": {"stage": 2, "overlap_comm": "maybe"}},
    MICRO | {"zero_optimization": {"stage": 2, "contiguous_gradients": None}},
    MICRO | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}},
    MICRO | {"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}},
    MICRO | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    MICRO | {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 50}}},
    MICRO | {"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
    MICRO | {"zero_optimization": {"stage": 3, "mics_shard_size": 8}},
    MICRO | {"zero_optimization": {"stage": 3, "compute_grad_norm": False}},
    MICRO | {"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"},
    MICRO | {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
    MICRO | {"bf16": {"enabled": True, "loss_scale": 0}},
    MICRO | {"fp16": {"enabled": True, "opt_level": "O2"}},
    MICRO | {"fp16": True},
    MICRO | {"fp16": None},
    MICRO | {"fp16": {"enabled": True, "loss_scale_window": 0}},
    MICRO | {"fp16": {"enabled": True, "loss_scale": -1}},
    MICRO | {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    MICRO | {"bf16": {"enabled": True, "bf16_optimizer_states": True}, "zero_optimization": {"stage": 1}},
    MICRO | {"amp": {"enabled": True}},
    MICRO | {"elasticity": {"enabled": True}},
    MICRO | {"optimizer": "AdamW"},
    MICRO | {"communication_data_type": "int8"},
    MICRO | {"checkpoint": {"tag_validation": "Sometimes"}},
    MICRO | {"tensorboard": {"enabled": True, "output": "x"}},
    MICRO | {"flops_profiler": "on"},
    MICRO | {"gradient_allreduce_op": "max"},
]


@pytest.fixture(scope="module")
def library():
    """What the installed DeepSpeed says."""
    script = pathlib.Path(__file__).with_name("deepspeed_library.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        input=json.dumps([*GOOD, *EXPORTED, *REFUSED]),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout[done.stdout.index('{"version"') :])


def test_every_field_of_its_models_is_in_the_table(library):
    if library["version"].split("+")[0] != VERSION:
        pytest.skip(f"the table is of {VERSION}, installed is {library['version']}")
    missing = [path for path in library["fields"] if path not in KEYS and path not in RENAMED]
    assert missing == []
    sections = {path.rpartition(".")[0] for path in library["fields"]}
    assert sections == CLOSED
    table = [path for path in KEYS if path.rpartition(".")[0] in CLOSED]
    assert [path for path in table if path not in library["fields"] and path != "tensor_parallel.tensor_parallel"] == []


def test_defaults_are_those_of_its_models(library):
    if library["version"].split("+")[0] != VERSION:
        pytest.skip(f"the table is of {VERSION}, installed is {library['version']}")
    differ = {
        path: (KEYS[path].default, default)
        for path, default in library["fields"].items()
        if path in KEYS and KEYS[path].kind not in ("object", "any", "list") and KEYS[path].default != default
    }
    assert differ == {}


def test_every_name_that_it_looks_up_is_in_the_table(library):
    known = {*KEYS, *RENAMED, *REMOVED}
    unlisted = [name for name in library["looked_up"] if name not in known]
    assert [name for name in unlisted if name.rpartition(".")[0] not in FREE] == []


def test_removed_keys_are_the_ones_that_it_refuses(library):
    assert set(REMOVED) == set(library["removed"])


def test_what_it_takes_is_no_mistake(library):
    for config, refusal in zip([*GOOD, *EXPORTED], library["refusals"], strict=False):
        assert refusal is None, config
        assert [str(one) for one in lk.plan.from_deepspeed(config, world_size=1).mistakes] == [], config


def test_what_it_refuses_is_a_mistake(library):
    for config, refusal in zip(REFUSED, library["refusals"][len(GOOD) + len(EXPORTED) :], strict=True):
        said = lk.plan.from_deepspeed(config, world_size=1)
        assert refusal is not None, config
        severities = {one.severity for one in said.findings}
        is_whole = "train_batch_size" in config or "train_micro_batch_size_per_gpu" in config
        # Without any batch size the file may be a part of one, which Trainer completes.
        assert ("mistake" if is_whole else "risk") in severities, (config, refusal, said.findings)
