"""Which keys DeepSpeed does not know: misspelt, in the wrong section, renamed, removed, or of another program."""

from collections.abc import Iterator, Mapping

from labkit.configuration.document import Document, walk
from labkit.configuration.finding import Finding, mistake, note, risk
from labkit.configuration.known import (
    CLOSED,
    KEYS,
    REMOVED,
    RENAMED,
    SECTIONS,
    VERSION,
    elsewhere,
    full_name,
    nearest_key,
)
from labkit.spec.checks import shown

__all__ = ["check_names"]

_CONFIG = "deepspeed/runtime/config.py"

# What people write at the top who have met it in Trainer, Accelerate, Lightning or Megatron -> DeepSpeed's key.
_FOREIGN = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "batch_size": "train_batch_size",
    "global_batch_size": "train_batch_size",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
    "clip_grad": "gradient_clipping",
    "learning_rate": "optimizer.params.lr",
    "lr": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "warmup_steps": "scheduler.params.warmup_num_steps",
    "mixed_precision": "bf16.enabled or fp16.enabled",
    "precision": "bf16.enabled or fp16.enabled",
    "zero_stage": "zero_optimization.stage",
    "stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
_NOT_IN_BF16 = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "auto_cast")


def check_names(doc: Document) -> Iterator[Finding]:
    """Find keys that are not read, or not any more."""
    for path, value in walk(doc.given):
        section = path.rpartition(".")[0]
        if full_name(path) in KEYS and path not in RENAMED:
            continue
        if section and section not in SECTIONS and section not in RENAMED:
            continue
        if path in REMOVED:
            reason = REMOVED[path]
            make = risk if doc.facts.at_least(0, 19) is False else mistake
            yield make(
                path,
                f"{path} is given",
                f"DeepSpeed {VERSION} refuses it",
                f"{reason[0].upper()}{reason[1:]}.",
                _CONFIG,
            )
        elif path in RENAMED:
            yield _renamed(doc, path, value)
        elif section == "bf16" and path.rpartition(".")[2] in _NOT_IN_BF16:
            yield _loss_scale_in_bf16(path, value, is_ignored=doc.facts.at_least(0, 17) is False)
        elif section != "bfloat16":
            yield _unknown(path, section, value, doc.precision)


def _renamed(doc: Document, path: str, value: object) -> Finding:
    new = RENAMED[path]
    both = f"zero_optimization.{new.rpartition('.')[2]}" if path.startswith("zero_optimization") else new
    if path in ("aio.thread_count", "tensor_parallel.tp_size"):
        kind = "refuses" if path.startswith("tensor") else "ignores"
        return mistake(
            path, f"{path}={shown(value)}", f"DeepSpeed {VERSION} {kind} that name", f"Write {new}.", _CONFIG
        )
    if path.startswith("zero_optimization.cpu_offload") and _stands(doc.given, both):
        return mistake(
            path,
            f"{path} and {both} are both given",
            "DeepSpeed refuses the old spelling beside the new one",
            f"Drop {path}.",
            "deepspeed/runtime/config_utils.py",
        )
    if path == "bfloat16":
        return note(path, "bfloat16 is the old spelling of bf16", "DeepSpeed still reads it", "Write bf16.", _CONFIG)
    if path.endswith("pin_memory"):
        return risk(path, f"{path}={shown(value)} is an old key", "it has no effect any more", f"Write {new}.", _CONFIG)
    is_offload = path.startswith("zero_optimization.cpu_offload")
    if is_offload and value in (False, "false"):
        fix = f"Drop it: it says false, which is the default; switched on it is now {new}={{'device': 'cpu'}}."
    elif is_offload:
        fix = f"Write {new}={{'device': 'cpu'}}."
    else:
        fix = f"Write {new}."
    return risk(
        path,
        f"{path}={shown(value)} is the old spelling of {new.rpartition('.')[2]}",
        "DeepSpeed warns and still reads it",
        fix,
        "deepspeed/runtime/zero/config.py",
    )


def _stands(given: Mapping[str, object], path: str) -> bool:
    return any(one == path for one, _ in walk(given))


def _loss_scale_in_bf16(path: str, value: object, *, is_ignored: bool) -> Finding:
    name = path.rpartition(".")[2]
    make = risk if is_ignored else mistake
    return make(
        path,
        f"{path}={shown(value)}",
        "bfloat16 has the range of float32 and no loss scaling, and DeepSpeed from 0.17.1 on refuses that key in bf16 "
        "('Extra inputs are not permitted'; older ones ignored it)",
        f"Drop {name}: it belongs to fp16.",
        "deepspeed/runtime/precision_config.py; DeepSpeed pull request 6976, FlagEmbedding issue 1487",
    )


def _unknown(path: str, section: str, value: object, precision: str) -> Finding:
    name = path.rpartition(".")[2]
    is_closed = section in CLOSED
    rule = (
        f"DeepSpeed {VERSION} refuses unknown keys in {section} ('Extra inputs are not permitted')"
        if is_closed
        else f"DeepSpeed ignores unknown keys {f'in {section}' if section else 'at the top'} without a word, so this "
        "has no effect"
    )
    fact = f"{path[:100]}={shown(value)} is no key that DeepSpeed knows"
    source = "deepspeed/runtime/config_utils.py" if is_closed else _CONFIG
    place = elsewhere(path)
    if place:
        home = place.rpartition(".")[0]
        fact = f"{name[:60]} stands {f'in {section}' if section else 'at the top'}"
        return mistake(path, fact, rule, f"Move it {f'into {home}' if home else 'to the top'}: {place}.", source)
    if path == "fp8":
        fix = "Make layers of Transformer Engine in the model, and set bf16.enabled to true here."
        rule = f"DeepSpeed has no FP8 setting and ignores it: the run is in {precision}"
        return mistake(path, "fp8 is given", rule, fix, source)
    if not section and name in _FOREIGN:
        return mistake(path, fact, rule, f"DeepSpeed's name for it is {_FOREIGN[name]}.", source)
    near = nearest_key(path)
    if near:
        return mistake(path, fact, rule, f"Did you mean {near}?", source)
    if is_closed:
        fix = f"Drop it, or take a DeepSpeed that has it: {VERSION} does not."
        return mistake(path, fact, rule, fix, source)
    return risk(path, fact, rule, "Drop it, unless your own program reads it.", source)
