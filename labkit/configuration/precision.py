"""fp16, bf16 and what follows from them."""

from collections.abc import Iterator

from labkit.configuration.document import Document
from labkit.configuration.finding import Finding, mistake, note, risk

__all__ = ["check_precision"]

_CONFIG = "deepspeed/runtime/config.py"
_FLOOR = "Current loss scale already at minimum"
_FLOOR_SOURCE = "Chinese-LLaMA-Alpaca issue 534, DeepSpeedExamples issue 418"
_SCALE_KEYS = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


def check_precision(doc: Document) -> Iterator[Finding]:
    """Find precisions that exclude each other, and loss scaling that does nothing or fails."""
    fp16, bf16 = doc.flag("fp16.enabled"), doc.flag("bf16.enabled")
    if fp16 and bf16:
        yield mistake(
            "fp16.enabled",
            "fp16.enabled=true and bf16.enabled=true",
            "a model has one precision, and DeepSpeed refuses both",
            "Set fp16.enabled to false on GPUs that have bfloat16 (A100, H100 and newer), else bf16.enabled.",
            _CONFIG,
        )
    elif not fp16 and not bf16 and not doc.flag("torch_autocast.enabled"):
        yield from _no_precision(doc)
    if fp16 or doc.is_auto("fp16.enabled"):
        yield from _bf16_weights(doc, fp16)
    if fp16:
        yield from _loss_scale(doc)
    if (fp16 or bf16) and doc.flag("torch_autocast.enabled"):
        yield risk(
            "torch_autocast.enabled",
            f"torch_autocast and {doc.precision} are both on",
            "one casts inside the forward, the other casts the model",
            "Keep one of them.",
            "deepspeed/runtime/torch_autocast.py",
        )
    yield from _low_precision_state(doc)
    yield from _data_types(doc)


def _no_precision(doc: Document) -> Iterator[Finding]:
    if doc.is_auto("fp16.enabled") or doc.is_auto("bf16.enabled"):
        return
    if doc.stage or doc.has("train_batch_size") or doc.has("train_micro_batch_size_per_gpu"):
        yield note(
            "bf16.enabled",
            "neither bf16 nor fp16 is on",
            "the model trains in the type it has, float32 by default: 4 bytes a weight and a gradient instead of 2",
            "Set bf16.enabled to true for mixed precision.",
        )


def _bf16_weights(doc: Document, is_on: bool) -> Iterator[Finding]:
    facts = doc.facts
    value = "true" if is_on else "'auto'"
    fix = (
        "Train in bfloat16: bf16.enabled=true, fp16 off, torch_dtype=bfloat16 (the GPU must have it: A100 and newer). "
        "A lower min_loss_scale only hides it."
    )
    if facts.was_trained_in_bf16 and (_FLOOR in facts.words or "OVERFLOW" in facts.words.upper()):
        yield mistake(
            "fp16.enabled",
            f"fp16.enabled={value} for weights trained in bfloat16, and the loss scale fell to its floor",
            "bfloat16 reaches 3e38 and float16 65,504: activations of such models overflow at any loss scale",
            fix,
            _FLOOR_SOURCE,
        )
    elif facts.was_trained_in_bf16 and (is_on or "float16" in facts.words.replace("bfloat16", "")):
        yield risk(
            "fp16.enabled",
            f"fp16.enabled={value} for weights trained in bfloat16",
            "bfloat16 reaches 3e38 and float16 65,504: activations of such models may overflow at any loss scale",
            fix,
            _FLOOR_SOURCE,
        )
    elif is_on and not facts.was_trained_in_bf16:
        yield note(
            "fp16.enabled",
            "fp16.enabled=true",
            "float16 ends at 65,504: models trained in bfloat16 (LLaMA, T5, Mistral, Qwen, ...) overflow until the "
            "loss scale is at its floor",
            "Use bf16 for those.",
            _FLOOR_SOURCE,
        )


def _loss_scale(doc: Document) -> Iterator[Finding]:
    scale = doc.number("fp16.loss_scale")
    idle = [f"fp16.{name}" for name in _SCALE_KEYS if doc.has(f"fp16.{name}")]
    if scale:
        if idle:
            yield note(
                "fp16.loss_scale",
                f"loss_scale={scale:g} with {', '.join(idle)}",
                "a fixed loss scale uses none of them",
                "Set loss_scale to 0 for a dynamic one.",
            )
        return
    for name in ("loss_scale_window", "min_loss_scale"):
        value = doc.number(f"fp16.{name}")
        if value is not None and value <= 0:
            yield mistake(
                f"fp16.{name}",
                f"fp16.{name}={value:g}",
                "with a dynamic loss scale DeepSpeed takes 1 or more",
                f"Use {1000 if 'window' in name else 1}.",
                "deepspeed/runtime/precision_config.py",
            )
    power = doc.integer("fp16.initial_scale_power")
    if power is not None and power > 16:
        yield note(
            "fp16.initial_scale_power",
            f"initial_scale_power={power}: the loss scale starts at 2^{power}",
            f"every overflow skips a step and halves it: about {power - 16} steps are skipped on the way to 2^16",
            "Use 16.",
        )


def _low_precision_state(doc: Document) -> Iterator[Finding]:
    offloaded = doc.device("offload_optimizer") != "none"
    for path, needs_offload in (
        ("fp16.fp16_master_weights_and_grads", True),
        ("bf16.bf16_master_weights_and_grads", False),
        ("bf16.bf16_optimizer_states", False),
    ):
        if not doc.flag(path):
            continue
        if doc.stage == 0:
            fact = f"{path}=true with ZeRO stage 0"
            yield mistake(path, fact, "DeepSpeed supports it in stages 1, 2 and 3", "Use stage 1 or more.", _CONFIG)
        elif needs_offload and not offloaded:
            rule = "it needs optimizer offload with DeepSpeedCPUAdam"
            yield mistake(path, f"{path}=true without offload", rule, "Set offload_optimizer.device to cpu.", _CONFIG)
    if doc.flag("bf16.bf16_optimizer_states") and not doc.flag("bf16.bf16_master_weights_and_grads"):
        yield mistake(
            "bf16.bf16_optimizer_states",
            "bf16_optimizer_states=true without bf16_master_weights_and_grads",
            "DeepSpeed asks for both",
            "Set bf16_master_weights_and_grads to true.",
            _CONFIG,
        )


def _data_types(doc: Document) -> Iterator[Finding]:
    names = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
    grad = names.get(doc.text("data_types.grad_accum_dtype"))
    if grad and doc.stage == 0 and grad != doc.precision:
        yield mistake(
            "data_types.grad_accum_dtype",
            f"grad_accum_dtype={grad} with {doc.precision} and ZeRO stage 0",
            "without ZeRO DeepSpeed accumulates in the model's type only ('unsupported mix')",
            "Use stage 1, or leave it out.",
            "deepspeed/runtime/engine.py _do_optimizer_sanity_check",
        )
    param = names.get(doc.text("data_types.param_dtype"))
    if param and param != doc.precision:
        yield mistake(
            "data_types.param_dtype",
            f"param_dtype={param} while the precision is {doc.precision}",
            "both must agree",
            "Leave param_dtype out.",
            "deepspeed/runtime/engine.py",
        )
    if grad is None and doc.precision == "bf16" and doc.stage in (0, 1, 2, 3) and not doc.is_auto("bf16.enabled"):
        steps = doc.integer("gradient_accumulation_steps")
        if steps is not None and steps > 1 and doc.has("gradient_accumulation_steps"):
            yield note(
                "data_types.grad_accum_dtype",
                f"{steps} micro-batches are accumulated in bfloat16",
                "left out, gradients are accumulated in the model's type, with 8 bits of mantissa",
                "Set data_types.grad_accum_dtype to fp32 with ZeRO 1 or more, where memory allows.",
            )
