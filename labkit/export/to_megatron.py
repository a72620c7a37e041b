"""Plan -> the command line of Megatron-LM's `pretrain_gpt.py`."""

import shlex
from collections.abc import Iterable

from labkit.export.to_deepspeed import checked
from labkit.plan import Plan
from labkit.spec import Fp8, Training

__all__ = ["Arguments", "megatron"]

_RECIPES = {"delayed": "delayed", "current": "tensorwise", "block": "blockwise"}
_ZERO = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}


class Arguments(list[str]):
    """Command-line arguments in order.

    Attributes:
        notes: what of the plan they do not say.
    """

    def __init__(self, arguments: Iterable[str], notes: Iterable[str] = ()) -> None:
        super().__init__(arguments)
        self.notes = tuple(notes)

    def __str__(self) -> str:
        """Lines for a shell: one option a line, notes as comments before them."""
        lines: list[str] = []
        for word in self:
            if word.startswith("--") or not lines:
                lines.append(shlex.quote(word))
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return "\n".join([*(f"# {note}" for note in self.notes), " \\\n".join(lines)])


def megatron(plan: Plan, *, training: Training | None = None, fp8: Fp8 | None = None) -> Arguments:
    """Write a plan as arguments of Megatron-LM (names of `d98e8a6`, 2026-08-22).

    ZeRO 1 is its distributed optimizer, 2 and 3 its FSDP. Data-parallel ranks are what is left of the world size.

    Args:
        plan: what to write.
        training: optimizer, rates and clipping; None = those of a `Training` with its defaults.
        fp8: the recipe that a layout with the token fp8 casts by; None = the training's.

    Returns:
        The list of arguments; `.notes` says what has no counterpart, `str()` makes lines for a shell.

    Raises:
        PlanError: no plan, no training or no recipe, or a recipe with another precision.

    >>> from labkit.plan import build
    >>> from labkit.spec import Layout, Model
    >>> words = megatron(build(Model.preset("llama3-8b"), Layout.parse("dp2 tp4 pp2 m8 bf16")))
    >>> words[words.index("--tensor-model-parallel-size") + 1], words[words.index("--global-batch-size") + 1]
    ('4', '16')
    """
    plan, training = checked(plan, training, fp8)
    words: list[str] = []
    for name, value in [*_model(plan), *_layout(plan), *_fp8(plan, training), *_training(plan, training)]:
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return Arguments(words, _notes(plan, training))


def _model(plan: Plan) -> list[tuple[str, object]]:
    model = plan.model
    pairs: list[tuple[str, object]] = [
        ("num-layers", model.num_layers),
        ("hidden-size", model.d_model),
        ("ffn-hidden-size", model.d_ff),
        ("num-attention-heads", model.num_heads),
        ("seq-length", model.seq_len),
        ("max-position-embeddings", model.seq_len),
        ("vocab-size", model.vocab_size),
        ("make-vocab-size-divisible-by", 1),
        ("normalization", "RMSNorm" if model.norm == "rms" else "LayerNorm"),
        ("norm-epsilon", f"{model.norm_eps:g}"),
        ("position-embedding-type", "rope" if model.position == "rope" else "learned_absolute"),
        ("hidden-dropout", 0.0),
        ("attention-dropout", 0.0),
    ]
    if model.num_kv_heads != model.num_heads:
        pairs += [("group-query-attention", True), ("num-query-groups", model.num_kv_heads)]
    if model.position == "rope":
        pairs.append(("rotary-base", round(model.rope_theta)))
    pairs += [("swiglu", True)] if model.activation == "swiglu" else []
    pairs += [] if model.bias else [("disable-bias-linear", True)]
    pairs += [] if model.tied_embeddings else [("untie-embeddings-and-output-weights", True)]
    return pairs


def _layout(plan: Plan) -> list[tuple[str, object]]:
    layout = plan.layout
    pairs: list[tuple[str, object]] = [
        ("tensor-model-parallel-size", layout.tp),
        ("pipeline-model-parallel-size", layout.pp),
        ("micro-batch-size", layout.microbatch_size),
        ("global-batch-size", layout.global_batch_size),
    ]
    if layout.num_virtual_stages > 1:
        pairs.append(("num-virtual-stages-per-pipeline-rank", layout.num_virtual_stages))
    if layout.sequence_parallel:
        pairs.append(("sequence-parallel", True))
    if layout.precision != "fp32":
        pairs.append(("bf16", True))
    if layout.zero_stage:
        pairs.append(("use-distributed-optimizer", True))
    if layout.zero_stage >= 2:
        pairs += [("use-megatron-fsdp", True), ("data-parallel-sharding-strategy", _ZERO[layout.zero_stage])]
    if layout.hybrid > 1:
        pairs.append(("num-distributed-optimizer-instances", layout.hybrid))
    if layout.offload != "none":
        pairs.append(("optimizer-cpu-offload", True))
    if layout.recompute == "selective":
        pairs.append(("recompute-granularity", "selective"))
    elif layout.recompute == "full":
        pairs += [("recompute-granularity", "full"), ("recompute-method", "uniform"), ("recompute-num-layers", 1)]
    return pairs


def _fp8(plan: Plan, training: Training) -> list[tuple[str, object]]:
    if plan.layout.precision != "fp8":
        return []
    recipe = training.fp8 or Fp8()
    pairs: list[tuple[str, object]] = [("fp8-format", recipe.format), ("fp8-recipe", _RECIPES[recipe.recipe])]
    if recipe.recipe == "delayed":
        pairs += [
            ("fp8-amax-history-len", recipe.history),
            ("fp8-amax-compute-algo", recipe.amax),
            ("fp8-margin", recipe.margin),
        ]
    return pairs


def _training(plan: Plan, training: Training) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = [
        ("train-iters", training.num_steps),
        ("seed", max(1, training.seed)),
        ("optimizer", "adam" if training.optimizer == "adamw" else "sgd"),
        ("lr", f"{training.learning_rate:g}"),
        ("lr-decay-style", "constant"),
        ("weight-decay", f"{training.weight_decay:g}"),
        ("clip-grad", 0.0 if training.clip_norm is None else training.clip_norm),
    ]
    if training.optimizer == "adamw":
        pairs += [("adam-beta1", training.betas[0]), ("adam-beta2", training.betas[1])]
    else:
        pairs.append(("sgd-momentum", 0.0))
    return pairs


def _notes(plan: Plan, training: Training) -> list[str]:
    layout, notes = plan.layout, []
    notes.append(
        f"Start {layout.world_size} ranks: {layout.world_size} / (tp {layout.tp} * pp {layout.pp}) = dp {layout.dp}."
    )
    notes.append("Data, tokenizer and checkpoints are not part of a plan: --data-path, --tokenizer-type, --save.")
    if layout.pp > 1 and layout.schedule not in ("1f1b", "interleaved"):
        notes.append(f"Megatron-LM runs 1f1b, interleaved with virtual stages, and not {layout.schedule}.")
    if layout.pp > 1 and plan.model.num_layers % layout.num_stages:
        uneven = f"{plan.model.num_layers} layers are not divisible by {layout.num_stages} stages"
        notes.append(f"{uneven}: say which stage has how many with --pipeline-model-parallel-layout.")
    if layout.offload == "all":
        notes.append("Parameters cannot be offloaded: only the optimizer is.")
    if layout.zero_stage >= 2 and layout.pp > 1:
        notes.append(f"ZeRO {layout.zero_stage} is Megatron-FSDP; check that your version runs it with a pipeline.")
    if layout.reshard_after_forward is not None:
        notes.append("reshard_after_forward has no counterpart in Megatron-FSDP.")
    if layout.precision == "fp8":
        notes.append("FP8 needs Transformer Engine.")
        if (training.fp8 or Fp8()).recipe == "delayed" and layout.num_microbatches > 1:
            notes.append("Scales are updated after every micro-batch: the history looks back on those, not on steps.")
    if layout.precision == "fp32" and layout.zero_stage == 0:
        notes.append("Without --bf16 or --fp16 Megatron-LM trains in float32.")
    if training.seed == 0:
        notes.append("Seed 0 is written as 1: Megatron-LM's seed is positive.")
    return notes
