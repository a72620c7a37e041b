"""Values of the wrong type or range, judged as DeepSpeed does: sections of pydantic convert, the rest does not."""

import math
from collections.abc import Iterator, Mapping

from labkit.configuration.document import LARGEST, Document, walk
from labkit.configuration.finding import Finding, mistake, risk
from labkit.configuration.known import CLOSED, KEYS, Key, full_name
from labkit.spec.checks import choices_text, nearest, shown

__all__ = ["check_kinds"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "communication_data_type": ("fp16", "bf16", "fp32"),
    "seq_parallel_communication_data_type": ("fp16", "bf16", "fp32"),
    "gradient_allreduce_op": ("mean", "sum"),
    "checkpoint.tag_validation": ("ignore", "warn", "fail"),
    "checkpoint.writer.type": ("mock", "python", "fast"),
    "checkpoint.writer.data_parallel": ("replica", "socket", "machine"),
    "torch_autocast.dtype": ("bfloat16", "float16", "bf16", "fp16", "half", "torch.bfloat16", "torch.float16"),
    "data_types.grad_accum_dtype": ("fp32", "bf16", "fp16", "float32", "bfloat16", "float16"),
    "zero_optimization.offload_param.device": ("none", "cpu", "nvme"),
    "zero_optimization.offload_optimizer.device": ("none", "cpu", "nvme"),
}
_ANY_CASE = ("communication_data_type", "seq_parallel_communication_data_type", "gradient_allreduce_op", "checkpoint")
_FLAG_TEXTS = ("true", "false", "yes", "no", "on", "off", "1", "0", "t", "f", "y", "n")
_BELOW_ONE = ("offload_optimizer.ratio", "cpuadam_cores_perc", "topk_ratio")


def check_kinds(doc: Document) -> Iterator[Finding]:
    """Find values that DeepSpeed cannot take."""
    for raw, value in walk(doc.given):
        path = full_name(raw)
        key = KEYS.get(path)
        if key is None or value == "auto":
            continue
        is_lax = path.rpartition(".")[0] in CLOSED
        if value is None:
            yield from _null(key, is_lax)
        elif key.kind == "object":
            yield from _section(path, value)
        elif key.kind in ("integer", "number"):
            yield from _number(key, value, is_lax)
        elif key.kind == "flag":
            yield from _flag(key, value, is_lax)
        elif key.kind == "text":
            yield from _text(key, value)
        elif key.kind == "list" and not isinstance(value, list | tuple):
            yield mistake(path, f"{path}={shown(value)}", "it is a list", f"Write [{shown(value)}].")


def _null(key: Key, is_lax: bool) -> Iterator[Finding]:
    if key.default is None and (is_lax or key.kind != "object"):
        return
    if not is_lax and key.kind not in ("object", "number"):
        return
    rule = "DeepSpeed reads it without asking whether it is there" if not is_lax else "DeepSpeed refuses null there"
    yield mistake(key.path, f"{key.path}=null", rule, "Leave the key out.")


def _section(path: str, value: object) -> Iterator[Finding]:
    if isinstance(value, Mapping) or (path == "zero_optimization" and isinstance(value, bool)):
        if isinstance(value, bool):
            yield risk(
                path,
                f"zero_optimization={str(value).lower()}",
                f"the old form, which DeepSpeed reads as stage {int(value)}",
                f"Write {{'stage': {int(value)}}}.",
            )
        return
    if path in ("tensor_parallel.partition_config", "datastates_ckpt"):
        return
    inner = {"zero_optimization": "stage", "optimizer": "type", "scheduler": "type"}.get(path, "enabled")
    inner = "device" if path.rpartition(".")[2].startswith("offload_") else inner
    text = "true" if value is True else "false" if value is False else shown(value)
    yield mistake(
        path,
        f"{path}={text}",
        "it is an object with keys of its own",
        f"Write {{{inner!r}: {text}}} or what you meant.",
    )


def _number(key: Key, value: object, is_lax: bool) -> Iterator[Finding]:
    path = key.path
    if isinstance(value, str):
        yield from _number_as_text(key, value, is_lax)
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        yield mistake(path, f"{path}={_json(value)}", f"it is a number{_of(key)}", f"Write a number{_of(key)}.")
        return
    if isinstance(value, float) and not math.isfinite(value):
        if path != "steps_per_print":
            yield mistake(path, f"{path}={value}", f"it is a finite number{_of(key)}", "Write a finite number.")
        return
    if isinstance(value, int) and abs(value) >= LARGEST:
        yield mistake(path, f"{path}={shown(value)}", "it has more than 64 bits", f"Write a number{_of(key)}.")
    elif key.kind == "integer" and value != math.floor(value):
        yield _fraction(key, float(value))
    else:
        yield from _range(key, value)


def _number_as_text(key: Key, value: str, is_lax: bool) -> Iterator[Finding]:
    try:
        number: float | None = float(value)
    except ValueError:
        number = None
    if number is None or not math.isfinite(number):
        yield mistake(key.path, f"{key.path}={shown(value)}", f"it is a number{_of(key)}", f"Write a number{_of(key)}.")
    elif not is_lax:
        yield mistake(
            key.path,
            f"{key.path}={shown(value)} is text",
            "DeepSpeed computes with it as it stands ('>' not supported between 'str' and 'int')",
            f"Write {value.strip()} without quotes.",
        )
    elif key.kind == "integer" and number != math.floor(number):
        yield _fraction(key, number)
    elif key.kind == "integer" and not value.strip().lstrip("+-").replace("_", "").isdigit():
        yield mistake(
            key.path, f"{key.path}={shown(value)} is text", "a whole number in text has digits only", f"Write {value}."
        )
    else:
        yield from _range(key, number)


def _fraction(key: Key, value: float) -> Finding:
    rule = "DeepSpeed from 0.15 on takes a whole number there and refuses a fraction"
    fix = f"Write {math.floor(value)}"
    if key.path.endswith("prefetch_bucket_size"):
        hidden = math.sqrt(value / 0.9) if value > 0 else 0.5
        if hidden == round(hidden):
            fix += f" (0.9 * {round(hidden)}^2: older transformers filled in 'auto' so, newer ones round: update them)"
    source = "LLaMA-Factory issue 5252, DeepSpeed issue 6525, transformers issue 33402"
    return mistake(key.path, f"{key.path}={value!r}", rule, f"{fix}.", source)


def _range(key: Key, value: float | int) -> Iterator[Finding]:
    path = key.path
    if path == "zero_optimization.stage" and value not in (0, 1, 2, 3):
        yield mistake(path, f"{path}={value}", "the stages of ZeRO are 0, 1, 2 and 3", "Use one of them.")
    elif path.endswith(_BELOW_ONE) and not 0 <= value <= 1:
        yield mistake(path, f"{path}={value}", "it is a part, from 0 to 1", f"Write {min(max(value / 100, 0), 1):g}.")
    elif path == "zero_optimization.reduce_bucket_size" and value <= 0:
        yield mistake(path, f"{path}={value}", "a bucket holds one element or more", "Use 500000000, or leave it out.")
    elif value < 0 and path.startswith(("zero_optimization.", "gradient_clipping", "fp16.")):
        yield mistake(path, f"{path}={value}", "it is 0 or more", "Write 0 or more.")


def _flag(key: Key, value: object, is_lax: bool) -> Iterator[Finding]:
    if isinstance(value, bool):
        return
    if is_lax and (value in (0, 1) or (isinstance(value, str) and value.lower() in _FLAG_TEXTS)):
        return
    meant = isinstance(value, str) and value.lower() in ("true", "yes", "on", "1")
    rule = "it is true or false"
    if isinstance(value, str) and not is_lax:
        rule = "DeepSpeed takes it as it stands here, and any text counts as true or fails"
    yield mistake(
        key.path, f"{key.path}={shown(value)}", rule, f"Write {str(meant or value == 1).lower()} without quotes."
    )


def _text(key: Key, value: object) -> Iterator[Finding]:
    path = key.path
    if not isinstance(value, str):
        yield mistake(path, f"{path}={shown(value)}", "it is text", "Write it in quotes.")
        return
    options = _CHOICES.get(path)
    plain = value.lower() if path.startswith(_ANY_CASE) else value
    if options and plain not in options:
        near = nearest(value, options)
        yield mistake(
            path,
            f"{path}={shown(value)} is unknown",
            f"it is {choices_text([repr(one) for one in options[:3]])}",
            f"Did you mean {near!r}?" if near else f"Use {options[0]!r}.",
        )


def _of(key: Key) -> str:
    return f" of {key.unit}" if key.unit else ""


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else shown(value)
