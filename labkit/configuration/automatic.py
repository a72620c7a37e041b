"""The value "auto": Hugging Face Trainer and Accelerate fill it in, DeepSpeed itself does not."""

import math
from collections.abc import Iterator, Mapping

from labkit.configuration.document import Document
from labkit.configuration.finding import Finding, mistake, note, risk
from labkit.configuration.known import CLOSED

__all__ = ["check_automatic"]

_ZERO = "zero_optimization"
_PREFETCH = f"{_ZERO}.stage3_prefetch_bucket_size"
_SIZES = (f"{_ZERO}.reduce_bucket_size", _PREFETCH, f"{_ZERO}.stage3_param_persistence_threshold")
_FILLED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "fp16.enabled",
    "bf16.enabled",
    *_SIZES,
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
    f"{_ZERO}.offload_param.device",
    f"{_ZERO}.offload_param.nvme_path",
    f"{_ZERO}.offload_optimizer.device",
    f"{_ZERO}.offload_optimizer.nvme_path",
)
_FILLED_PARAMS = ("lr", "betas", "eps", "weight_decay")
_FILLED_SCHEDULE = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
_MEANS_AUTO = ("pipeline.stages", "data_types.keep_in_fp32_modules")
_THREADS = "DeepSpeed issue 1270, transformers issue 16495"


def check_automatic(doc: Document) -> Iterator[Finding]:
    """Find fields left to an integration that may not be there."""
    autos = [path for path, value in doc.values.items() if value == "auto" and not _means_auto(path)]
    for section in ("optimizer.params", "scheduler.params"):
        params = doc.values.get(section)
        if isinstance(params, Mapping):
            autos += [f"{section}.{name}" for name, value in params.items() if value == "auto"]
    if not autos:
        return
    is_filled = doc.facts.is_hugging_face
    if is_filled is not True:
        yield _not_filled(autos, is_filled)
    yield from _left_out(doc)
    yield from _never_filled(autos)
    if doc.is_auto(_PREFETCH):
        yield _prefetch(doc)
    yield from _filled_sizes(doc)


def _left_out(doc: Document) -> Iterator[Finding]:
    """Trainer changes only what says "auto": what is left out stays DeepSpeed's default."""
    path = "gradient_accumulation_steps"
    if path not in doc.values and (doc.is_auto("train_batch_size") or doc.is_auto("train_micro_batch_size_per_gpu")):
        yield risk(
            path,
            "gradient_accumulation_steps is left out beside batch sizes of 'auto'",
            "Trainer fills in what says 'auto' only, so its own number of steps may not arrive here",
            "Set it to 'auto' too.",
            "transformers issue 35484",
        )
    if doc.facts.is_hugging_face and _ZERO not in doc.values:
        yield mistake(
            _ZERO,
            "no zero_optimization section",
            "Accelerate refuses a DeepSpeed configuration without one",
            "Add zero_optimization with a stage (0 for none).",
            "accelerate/utils/dataclasses.py",
        )


def _means_auto(path: str) -> bool:
    return path in _MEANS_AUTO or path.startswith(f"{_ZERO}.zenflow")


def _not_filled(autos: list[str], is_filled: bool | None) -> Finding:
    refused = [path for path in autos if path.rpartition(".")[0] not in CLOSED]
    dropped = [path for path in autos if path not in refused]
    said = []
    if refused:
        said.append(
            f"fails at {', '.join(refused[:4])}{' ...' if len(refused) > 4 else ''} (compares text with a number)"
        )
    if dropped:
        said.append(f"drops {', '.join(dropped[:5])}{' ...' if len(dropped) > 5 else ''} and takes the defaults")
        if any(path.endswith("16.enabled") for path in dropped):
            said.append("so it trains in float32")
    make = mistake if is_filled is False else risk
    return make(
        autos[0],
        f"{len(autos)} field{'s are' if len(autos) > 1 else ' is'} 'auto'",
        f"Trainer and Accelerate fill them in; DeepSpeed alone {', '.join(said)}",
        "Write numbers, unless Trainer or Accelerate reads the file.",
        _THREADS,
    )


def _never_filled(autos: list[str]) -> Iterator[Finding]:
    known = {
        *_FILLED,
        *(f"optimizer.params.{name}" for name in _FILLED_PARAMS),
        *(f"scheduler.params.{name}" for name in _FILLED_SCHEDULE),
    }
    left = [path for path in autos if path not in known]
    if left:
        yield risk(
            left[0],
            f"{', '.join(left[:6])} {'are' if len(left) > 1 else 'is'} 'auto'",
            "Trainer fills in no such field: in sections that DeepSpeed checks the default stays, elsewhere the text "
            "'auto' arrives",
            "Leave it out, or write a value.",
            "transformers/integrations/deepspeed.py",
        )


def _prefetch(doc: Document) -> Finding:
    hidden = doc.facts.hidden_size
    source = "LLaMA-Factory issue 5252, DeepSpeed issue 6525, transformers issue 33402"
    rule = "DeepSpeed from 0.15 on refuses a fraction there ('Input should be a valid integer')"
    ways = "or update transformers, which rounds in newer versions, or use DeepSpeed 0.14"
    if hidden is None:
        return note(
            _PREFETCH,
            "stage3_prefetch_bucket_size='auto' becomes 0.9 * hidden_size^2 in older transformers, a fraction",
            rule,
            f"If that is refused, write its whole part, {ways}.",
            source,
        )
    exact = 9 * hidden * hidden / 10
    if 9 * hidden * hidden % 10 == 0:
        rule = "a whole number of elements"
        return note(_PREFETCH, f"stage3_prefetch_bucket_size='auto' becomes 0.9 * {hidden}^2 = {exact:.0f}", rule)
    is_refused = "stage3_prefetch_bucket_size" in doc.facts.words or doc.facts.at_least(0, 15)
    make = mistake if is_refused else risk
    return make(
        _PREFETCH,
        f"stage3_prefetch_bucket_size='auto' becomes 0.9 * {hidden}^2 = {exact:.1f} in older transformers",
        rule,
        f"Set stage3_prefetch_bucket_size={math.floor(exact)}, {ways}.",
        source,
    )


def _filled_sizes(doc: Document) -> Iterator[Finding]:
    hidden = doc.facts.hidden_size
    if hidden is None or not any(doc.is_auto(path) for path in _SIZES):
        return
    values = {_SIZES[0]: hidden * hidden, _SIZES[2]: 10 * hidden}
    parts = [f"{path.rpartition('.')[2]} = {size:,}" for path, size in values.items() if doc.is_auto(path)]
    if parts:
        rule = "Trainer computes hidden_size^2 and 10 * hidden_size"
        yield note(_SIZES[0], f"for hidden size {hidden}: {', '.join(parts)} elements", rule)
