"""Plan -> the TOML that torchtitan's `--job.config_file` reads."""

from labkit.export.to_deepspeed import checked
from labkit.plan import Plan
from labkit.spec import Fp8, Training

__all__ = ["torchtitan"]

_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
    "own": "PipelineScheduleMulti",
}


def torchtitan(plan: Plan, *, training: Training | None = None, fp8: Fp8 | None = None) -> str:
    """Write a plan as settings of torchtitan, names of its job configuration in 0.2.2.

    Comments say what has no counterpart. From 0.3 on torchtitan has no file: its configuration is Python, and the
    same names are options, such as `--parallelism.tensor_parallel_degree`; batch sizes are then given in tokens.

    Args:
        plan: what to write.
        training: optimizer, rates and clipping; None = those of a `Training` with its defaults.
        fp8: the recipe that a layout with the token fp8 casts by; None = the training's.

    Raises:
        PlanError: no plan, no training or no recipe, or a recipe with another precision.

    >>> from labkit.plan import build
    >>> from labkit.spec import Layout, Model
    >>> text = torchtitan(build(Model.preset("llama3-8b"), Layout.parse("dp2 tp2 pp2 m8 bf16")))
    >>> [line for line in text.splitlines() if "parallel_degree" in line]
    ['tensor_parallel_degree = 2', 'pipeline_parallel_degree = 2', 'context_parallel_degree = 1']
    """
    plan, training = checked(plan, training, fp8)
    lines = [f"# {note}" for note in _notes(plan, training)]
    for section, values in _sections(plan, training).items():
        lines += ["", f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def _sections(plan: Plan, training: Training) -> dict[str, dict[str, object]]:
    layout = plan.layout
    sections: dict[str, dict[str, object]] = {
        "model": {"name": "llama3", "flavor": "debugmodel"},
        "training": {
            # A pipeline's micro-batches are cut from the local batch; without one they are accumulated.
            "local_batch_size": layout.microbatch_size * (layout.num_microbatches if layout.pp > 1 else 1),
            "global_batch_size": layout.global_batch_size,
            "seq_len": plan.model.seq_len,
            "max_norm": 1e9 if training.clip_norm is None else training.clip_norm,
            "steps": training.num_steps,
            "mixed_precision_param": "float32" if layout.precision == "fp32" else "bfloat16",
            "mixed_precision_reduce": "float32",
            "enable_cpu_offload": layout.offload == "all",
        },
        "optimizer": _optimizer(training),
        "lr_scheduler": {"warmup_steps": 0, "min_lr_factor": 1.0},
        "parallelism": _parallelism(plan),
        "activation_checkpoint": {"mode": layout.recompute},
        "debug": {"seed": training.seed},
    }
    if layout.recompute == "selective":
        sections["activation_checkpoint"]["selective_ac_option"] = "op"
    if layout.precision == "fp8":
        sections["model"]["converters"] = ["quantize.linear.float8"]
        is_block = (training.fp8 or Fp8()).recipe == "block"
        sections["quantize.linear.float8"] = {"recipe_name": "rowwise" if is_block else "tensorwise"}
    return sections


def _optimizer(training: Training) -> dict[str, object]:
    return {
        "name": "AdamW",
        "lr": training.learning_rate,
        "beta1": training.betas[0],
        "beta2": training.betas[1],
        "weight_decay": training.weight_decay,
    }


def _parallelism(plan: Plan) -> dict[str, object]:
    layout = plan.layout
    is_sharded = layout.zero_stage >= 2
    replicas = layout.hybrid if is_sharded else layout.dp
    values: dict[str, object] = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": layout.dp // replicas,
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "context_parallel_degree": 1,
    }
    if is_sharded:
        keeps = layout.zero_stage == 2 or layout.reshard_after_forward is False
        values["fsdp_reshard_after_forward"] = "never" if keeps else "always"
    if layout.pp > 1:
        values["pipeline_parallel_schedule"] = _SCHEDULES[layout.schedule]
        values["pipeline_parallel_microbatch_size"] = layout.microbatch_size
    return values


def _notes(plan: Plan, training: Training) -> list[str]:
    layout, model = plan.layout, plan.model
    notes = [f"{plan}", f"Start {layout.world_size} ranks. Names: torchtitan 0.2.2, torchtitan/config/job_config.py."]
    notes.append(f"The model is a flavor in code: {model}.")
    if layout.schedule == "own":
        notes.append("The actions of a schedule of one's own go to a file: pipeline_parallel_schedule_csv names it.")
    if layout.zero_stage == 1:
        notes.append("ZeRO 1 has no counterpart: gradients and parameters are whole here, and so is the optimizer.")
    if layout.tp > 1 and not layout.sequence_parallel:
        notes.append("torchtitan's tensor parallel always splits the sequence too.")
    if layout.offload == "optimizer":
        notes.append("Offload of the optimizer alone has no counterpart: enable_cpu_offload moves parameters too.")
    if layout.precision == "bf16" and not (layout.zero_stage >= 2):
        notes.append("Without sharding mixed precision is torch.autocast here.")
    if layout.precision == "fp8":
        notes += ["FP8 needs torchao and an H100 or newer.", *_fp8_notes(training.fp8 or Fp8())]
    if training.optimizer == "sgd":
        notes.append("SGD has no counterpart: AdamW stands for it.")
    if training.clip_norm is None:
        notes.append("max_norm cannot be switched off: it is out of reach.")
    return notes


def _fp8_notes(recipe: Fp8) -> list[str]:
    """What of a recipe is not said: torchao knows tensor-wise scales (E5M2 for gradients) and row-wise ones (E4M3)."""
    if recipe.recipe == "block":
        notes = ["Block scaling has no counterpart: one scale for each row (rowwise) stands for it."]
        return notes if recipe.format == "e4m3" else [*notes, "Rowwise is E4M3 for gradients too."]
    notes = []
    if recipe.recipe == "delayed":
        notes.append("Delayed scaling has no counterpart: the tensor's own amax (tensorwise) stands for it.")
    if recipe.format == "e4m3":
        notes.append("Tensorwise is E5M2 for gradients.")
    return notes


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_toml(one) for one in value)}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)
