"""A configuration field by field: value, unit, default and meaning."""

import json
from collections.abc import Iterator, Mapping

from labkit.configuration.batch import batch_of
from labkit.configuration.document import Document, walk
from labkit.configuration.finding import Field
from labkit.configuration.known import KEYS, RENAMED, Key, full_name

__all__ = ["fields_of"]

# What is in force without being said, and worth a line.
_ALWAYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_optimization.stage",
)
_WITH_ZERO = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.overlap_comm",
    "zero_optimization.contiguous_gradients",
)
_WITH_STAGE_3 = (
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
)
_PARAMS = {
    "lr": "learning rate",
    "betas": "decay rates of Adam's two averages",
    "eps": "added to the root of Adam's second average",
    "weight_decay": "pull of the weights towards 0, a step, relative",
    "torch_adam": "whether torch's Adam is used and not DeepSpeed's fused one",
    "adam_w_mode": "whether the decay is decoupled (AdamW)",
    "momentum": "part of the last update that is kept",
    "warmup_min_lr": "rate at the first step",
    "warmup_max_lr": "rate after warm-up",
    "warmup_num_steps": "optimizer steps of warm-up",
    "total_num_steps": "optimizer steps of the run",
    "warmup_type": "log (default) or linear",
}


def fields_of(doc: Document) -> tuple[Field, ...]:
    """Explain what the file gives, in its order, then what is in force without being said."""
    said = list(_given(doc))
    names = {full_name(field.path) for field in said}
    silent = [*_ALWAYS, *(_WITH_ZERO if doc.stage else ()), *(_WITH_STAGE_3 if doc.stage == 3 else ())]
    return (*said, *(_silent(doc, KEYS[path]) for path in silent if path not in names))


def _given(doc: Document) -> Iterator[Field]:
    for raw, value in walk(doc.given):
        path = full_name(raw)
        key = KEYS.get(RENAMED.get(path, path))
        if path in ("optimizer.params", "scheduler.params") and isinstance(value, Mapping):
            for name, one in value.items():
                meaning = _PARAMS.get(str(name), "handed to the constructor")
                yield Field(path=f"{raw}.{name}", value=_text(one), default="", unit="", meaning=meaning)
        elif isinstance(value, Mapping) and (key is None or key.kind == "object"):
            if not value or key is None:
                meaning = key.meaning if key else "no key that DeepSpeed knows"
                yield Field(path=raw, value=_text(value), default="", unit="", meaning=meaning)
        elif key is None:
            yield Field(path=raw, value=_text(value), default="", unit="", meaning="no key that DeepSpeed knows")
        else:
            yield Field(
                path=raw,
                value=_text(value),
                default=_default(doc, key),
                unit=_unit(doc, key, value),
                meaning=key.meaning,
            )


def _silent(doc: Document, key: Key) -> Field:
    value = key.default
    batch = batch_of(doc)
    if batch is not None and key.path in _ALWAYS[:3]:
        value = dict(zip(_ALWAYS[:3], (batch.total, batch.micro, batch.steps), strict=True))[key.path]
    default = _default(doc, key)
    text = default if value is None else _text(value)
    return Field(
        path=key.path, value=text, default=default, unit=_unit(doc, key, value), meaning=key.meaning, is_given=False
    )


def _default(doc: Document, key: Key) -> str:
    if key.path.endswith("overlap_comm"):
        return "true" if doc.stage == 3 else "false"
    if key.path in _ALWAYS[:3]:
        return "computed"
    return "none" if key.default is None else _text(key.default)


def _unit(doc: Document, key: Key, value: object) -> str:
    if key.unit != "elements" or isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
        return key.unit
    size = value * doc.element_bytes
    text = f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
    return f"elements = {text} in {doc.precision}"


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e18:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if value.bit_length() < 200 else f"an integer of {value.bit_length()} bits"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(type(value).__name__)
    return text if len(text) <= 60 else f"{text[:57]}..."
