"""ZeRO: stages, keys that belong to other stages, and what excludes what."""

from collections.abc import Iterator

from labkit.configuration.document import Document
from labkit.configuration.finding import Finding, mistake, note, risk
from labkit.configuration.known import KEYS, STAGE_3_KEYS
from labkit.spec.checks import choices_text, divisors

__all__ = ["check_sharding"]

_ZERO = "zero_optimization"
_ENGINE = "deepspeed/runtime/engine.py"


def check_sharding(doc: Document) -> Iterator[Finding]:
    """Find what does not go with the ZeRO stage."""
    yield from _pipeline(doc)
    yield from _other_stage(doc)
    yield from _gradients(doc)
    yield from _zero_plus_plus(doc)
    yield from _saving(doc)
    yield from _experts(doc)
    if doc.flag(f"{_ZERO}.legacy_stage1"):
        rule = "DeepSpeed refuses it since 0.5.9"
        yield mistake(f"{_ZERO}.legacy_stage1", "legacy_stage1=true", rule, "Leave it out.", _ENGINE)
    if doc.flag(f"{_ZERO}.elastic_checkpoint") and doc.stage == 3:
        yield risk(
            f"{_ZERO}.elastic_checkpoint",
            "elastic_checkpoint=true with stage 3",
            "stage 3 does not support it: a checkpoint loads on the same number of ranks only",
            "Convert to a Universal checkpoint and set checkpoint.load_universal.",
            "deepspeed/runtime/zero/config.py",
        )
    if not doc.flag(f"{_ZERO}.compute_grad_norm"):
        yield from _no_norm(doc)


def _pipeline(doc: Document) -> Iterator[Finding]:
    has_section = isinstance(doc.values.get("pipeline"), dict)
    if doc.stage < 2 or not (doc.facts.is_pipeline or has_section):
        return
    fact = f"stage={doc.stage} with {'a PipelineModule' if doc.facts.is_pipeline else 'a pipeline section'}"
    rule = "DeepSpeed's pipeline engine refuses ZeRO 2 and 3: a pipeline keeps gradients over all its micro-batches"
    fix = "Use stage 1 (or 0)."
    source = "deepspeed/runtime/pipe/engine.py; DeepSpeed issues 568 and 823"
    make = mistake if doc.facts.is_pipeline else risk
    yield make(f"{_ZERO}.stage", fact, rule, fix, source)


def _other_stage(doc: Document) -> Iterator[Finding]:
    stage = doc.stage
    if f"{_ZERO}.stage" in doc.values and doc.integer(f"{_ZERO}.stage") not in (0, 1, 2, 3):
        return
    given = [path for path in doc.values if path in STAGE_3_KEYS and doc.has(path) and _differs(doc, path)]
    given = [path for path in given if "offload" not in path]
    if given and stage != 3:
        names = ", ".join(path.rpartition(".")[2] for path in given)
        yield risk(
            given[0],
            f"stage={stage} with {names}",
            "what is read in stage 3 only does nothing here",
            "Use stage 3, or leave it out.",
            "deepspeed/runtime/zero/config.py",
        )
    if stage == 3 and doc.flag(f"{_ZERO}.round_robin_gradients"):
        rule = "it spreads copies in stages 1 and 2 only, and does nothing here"
        yield risk(f"{_ZERO}.round_robin_gradients", "round_robin_gradients=true with stage 3", rule, "Drop it.")
    if f"{_ZERO}" in doc.values and f"{_ZERO}.stage" not in doc.values and isinstance(doc.values[_ZERO], dict):
        yield risk(
            f"{_ZERO}.stage",
            "zero_optimization without a stage",
            "the default is stage 0: nothing is sharded",
            "Set stage to 1, 2 or 3.",
            "deepspeed/runtime/zero/config.py",
        )


def _differs(doc: Document, path: str) -> bool:
    return path not in KEYS or doc.values[path] != KEYS[path].default


def _gradients(doc: Document) -> Iterator[Finding]:
    stage, factor = doc.stage, doc.number("gradient_predivide_factor")
    is_scattered = stage >= 2 and doc.flag(f"{_ZERO}.reduce_scatter")
    if is_scattered and doc.flag("prescale_gradients"):
        rule = "reduce-scatter supports no division before the sum"
        fix = "Drop prescale_gradients, or set reduce_scatter to false."
        yield mistake(
            "prescale_gradients", f"prescale_gradients=true with stage {stage}", rule, fix, "deepspeed/runtime/zero"
        )
    if is_scattered and factor not in (None, 1):
        fact = f"gradient_predivide_factor={factor:g} with stage {stage}"
        rule = "reduce-scatter supports the factor 1 only"
        yield mistake("gradient_predivide_factor", fact, rule, "Drop it.", "deepspeed/runtime/zero")
    if doc.text("gradient_allreduce_op").lower() == "sum" and stage == 3:
        rule = "DeepSpeed refuses the sum in stage 3"
        yield mistake("gradient_allreduce_op", "gradient_allreduce_op='sum' with stage 3", rule, "Use 'mean'.", _ENGINE)
    path = f"{_ZERO}.overlap_comm"
    if stage in (1, 2) and doc.flag(path) and not doc.flag(f"{_ZERO}.contiguous_gradients"):
        yield note(path, "overlap_comm=true with contiguous_gradients=false", "overlap uses the contiguous buffers")
    if stage and doc.flag(path) and "nan" in doc.facts.words.lower().split():
        yield risk(
            path,
            "overlap_comm=true, and NaN is reported",
            "there are open reports of data races with it",
            "Set it to false to tell whether it is the cause.",
            "DeepSpeed issues 5545, 5347, 7188",
        )


def _zero_plus_plus(doc: Document) -> Iterator[Finding]:
    inner, world = doc.integer(f"{_ZERO}.zero_hpz_partition_size"), doc.facts.world_size
    if inner and inner > 1 and world and (inner > world or world % inner):
        yield mistake(
            f"{_ZERO}.zero_hpz_partition_size",
            f"zero_hpz_partition_size={inner} with {world} ranks",
            "ranks fall into groups of that size, usually the GPUs of a node",
            f"Use {choices_text(divisors(world))}.",
        )


def _saving(doc: Document) -> Iterator[Finding]:
    path = f"{_ZERO}.stage3_gather_16bit_weights_on_model_save"
    if doc.stage != 3:
        return
    if doc.flag(path):
        yield note(
            path,
            "stage3_gather_16bit_weights_on_model_save=true",
            "only save_16bit_model() (Trainer's save_model) looks at it: whole 16-bit weights are gathered on rank 0, "
            "which takes time and host memory; save_checkpoint() stays sharded",
        )
    elif not doc.is_auto(path):
        yield note(
            path,
            "stage3_gather_16bit_weights_on_model_save is off",
            "each rank holds a part of every weight, so save_16bit_model() (and Trainer's save_model) saves no usable "
            "weights",
            "Switch it on, or make a state dict of a checkpoint with its zero_to_fp32.py.",
            "deepspeed/runtime/engine.py save_16bit_model",
        )


def _experts(doc: Document) -> Iterator[Finding]:
    if doc.stage == 3 and doc.facts.has_experts and f"{_ZERO}.leaf_module" not in doc.values:
        yield risk(
            f"{_ZERO}.leaf_module",
            "stage 3 with a mixture of experts",
            "ranks that use different experts do not gather and reduce the same parameters, and wait for each other",
            "Name the block of experts in zero_optimization.leaf_module.classes, or call set_z3_leaf_modules on it.",
            "DeepSpeed issue 7461, pull request 4966",
        )


def _no_norm(doc: Document) -> Iterator[Finding]:
    path = f"{_ZERO}.compute_grad_norm"
    if doc.stage not in (1, 2):
        fact = f"compute_grad_norm=false with stage {doc.stage}"
        yield mistake(path, fact, "DeepSpeed supports it in stages 1 and 2 only", "Leave it out.")
    elif (doc.number("gradient_clipping") or 0) > 0:
        clip = doc.number("gradient_clipping")
        rule = "clipping needs the norm"
        yield mistake(
            path, f"compute_grad_norm=false with gradient_clipping={clip:g}", rule, "Set gradient_clipping to 0."
        )
