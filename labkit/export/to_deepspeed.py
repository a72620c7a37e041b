"""Plan -> the configuration that `deepspeed.initialize(config=...)` takes."""

import dataclasses

from labkit.errors import PlanError
from labkit.plan import Plan
from labkit.spec import Fp8, Training
from labkit.spec.checks import shown

__all__ = ["checked", "deepspeed"]

_SCHEDULES = ("1f1b",)


def deepspeed(plan: Plan, *, training: Training | None = None, fp8: Fp8 | None = None) -> dict[str, object]:
    """Write a plan as a DeepSpeed configuration, checked against 0.19.8.

    Batch sizes, precision, ZeRO, offload, tensor parallel, optimizer and clipping are settings of the file. What is not
    (the pipeline's stages, its schedule, recompute, FP8) stands in `_notes`, a key that DeepSpeed ignores.
    `labkit.plan.from_deepspeed` is the inverse.

    Args:
        plan: what to write.
        training: optimizer, rates and clipping; None = those of a `Training` with its defaults.
        fp8: the recipe that a layout with the token fp8 casts by; None = the training's.

    Raises:
        PlanError: no plan, no training or no recipe, or a recipe with another precision.

    >>> from labkit.plan import build
    >>> from labkit.spec import Layout, Model
    >>> config = deepspeed(build(Model.preset("tiny"), Layout.parse("dp4 m2 b8 bf16")))
    >>> config["train_batch_size"], config["gradient_accumulation_steps"], config["bf16"]
    (64, 2, {'enabled': True})
    """
    plan, training = checked(plan, training, fp8)
    layout = plan.layout
    config: dict[str, object] = {
        "train_batch_size": layout.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.microbatch_size,
        "gradient_accumulation_steps": layout.num_microbatches,
        "gradient_clipping": 0.0 if training.clip_norm is None else training.clip_norm,
        "zero_optimization": _zero(plan),
        "optimizer": _optimizer(plan, training),
    }
    if layout.precision != "fp32":
        config["bf16"] = {"enabled": True}
        if layout.zero_stage:  # without ZeRO, DeepSpeed accumulates in the model's type only
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    if layout.zero_stage and training.optimizer == "sgd":
        config["zero_allow_untested_optimizer"] = True
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.pp > 1:
        config["pipeline"] = {"stages": layout.pp}
    notes = list(_notes(plan, training))
    return config | ({"_notes": notes} if notes else {})


def checked(plan: object, training: object, fp8: Fp8 | None) -> tuple[Plan, Training]:
    """Return plan and training if they are what they should be, with the usual training where there is none.

    Raises:
        PlanError: they are not.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"plan={shown(plan)} is no Plan: use labkit.plan.build(model, layout).")
    if training is None:
        training = Training(num_steps=1)
    if not isinstance(training, Training):
        raise PlanError(f"training={shown(training)} is no Training: use labkit.spec.Training(num_steps=10) or None.")
    if fp8 is not None:
        training = dataclasses.replace(training, fp8=fp8)
    training.check_precision(plan.layout.precision)
    return plan, training


def _zero(plan: Plan) -> dict[str, object]:
    layout = plan.layout
    zero: dict[str, object] = {"stage": layout.zero_stage}
    if layout.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if layout.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    if layout.zero_stage:
        # Elements, not bytes: the default of 500,000,000 allocates 1 GB in bf16, whatever the model's size.
        zero["reduce_bucket_size"] = min(500_000_000, max(1_000_000, plan.model.num_parameters))
    if layout.zero_stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        if layout.reshard_after_forward is False:
            zero["stage3_max_live_parameters"] = zero["stage3_max_reuse_distance"] = 2 * plan.model.num_parameters
    return zero


def _optimizer(plan: Plan, training: Training) -> dict[str, object]:
    params: dict[str, object] = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    if training.optimizer == "sgd":
        return {"type": "SGD", "params": params}
    params["betas"] = list(training.betas)
    if plan.layout.offload == "none":
        params["torch_adam"] = True  # torch's own AdamW: nothing to compile
    return {"type": "AdamW", "params": params}


def _notes(plan: Plan, training: Training) -> list[str]:
    layout, notes = plan.layout, []
    if layout.pp > 1:
        made = f"PipelineModule(layers, num_stages={layout.pp})"
        notes.append(f"The pipeline is made in code: {made}; DeepSpeed does not look at pipeline.stages.")
        if layout.zero_stage >= 2:
            notes.append(f"DeepSpeed's pipeline engine refuses ZeRO {layout.zero_stage}: use stage 1 there.")
        if layout.schedule not in _SCHEDULES:
            notes.append(f"DeepSpeed's pipeline runs 1f1b, not {layout.schedule}.")
        if layout.num_virtual_stages > 1:
            notes.append(f"DeepSpeed's pipeline has one stage a rank, not {layout.num_virtual_stages}.")
    if layout.tp > 1:
        notes.append("AutoTP splits models that it knows; another needs tensor_parallel.partition_config.")
    if layout.sequence_parallel:
        notes.append("Sequence parallel within tp has no counterpart; DeepSpeed's (Ulysses) splits attention heads.")
    if layout.recompute != "none":
        made = "deepspeed.checkpointing.checkpoint, or the model's own switch"
        notes.append(f"recompute={layout.recompute} is made in code: {made}.")
    if layout.precision == "fp8":
        layers = f"layers of Transformer Engine would cast by {training.fp8 or Fp8()}"
        notes.append(f"FP8 has no setting: bf16 stands for it; {layers}.")
    if layout.hybrid > 1:
        notes.append(f"hybrid={layout.hybrid} has no counterpart: stage {layout.zero_stage} shards over all dp ranks.")
    if layout.reshard_after_forward is False and layout.zero_stage == 2:
        notes.append("no_reshard with stage 2 is what DeepSpeed's stage 2 does: parameters are not sharded.")
    if layout.offload != "none" and layout.zero_stage == 0:
        notes.append("DeepSpeed offloads with ZeRO 1 or more only.")
    return notes
