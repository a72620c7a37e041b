"""The batch product: train_batch_size = micro-batch x accumulation x data-parallel ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from labkit.configuration.document import Document
from labkit.configuration.finding import Finding, mistake, note, risk
from labkit.spec.checks import choices_text, divisors

__all__ = ["Batch", "batch_of", "check_batch", "data_parallel_ranks", "num_stages"]

_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_RULE = "train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel ranks"
_SOURCE = "deepspeed/runtime/config.py _set_batch_related_parameters, _batch_assertion"
_MOST = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The three numbers as DeepSpeed completes them; 0 where a division leaves nothing.

    Attributes:
        total: samples of a step.
        micro: samples of a rank at a time.
        steps: micro-batches accumulated.
        dp: data-parallel ranks.
    """

    total: int
    micro: int
    steps: int
    dp: int

    @property
    def fits(self) -> bool:
        """Whether the product is right and nothing is 0."""
        return min(self.total, self.micro, self.steps) > 0 and self.total == self.micro * self.steps * self.dp


def data_parallel_ranks(doc: Document) -> int | None:
    """Ranks among which the batch is divided: all, without those that share a sample."""
    world = doc.facts.world_size
    stages = num_stages(doc)
    if world is None or stages is None:
        return None
    shared = stages
    for path in ("tensor_parallel.autotp_size", "sequence_parallel_size"):
        shared *= max(1, doc.integer(path) or 1)
    return world // shared if world % shared == 0 else None


def num_stages(doc: Document) -> int | None:
    """Stages of the pipeline, which share a sample; None where there is one and nobody says how long it is."""
    said = doc.integer("pipeline.stages") if doc.has("pipeline.stages") else None
    if said is not None and 0 < said < 10**6:
        return said
    return None if doc.facts.is_pipeline else 1


def batch_of(doc: Document) -> Batch | None:
    """Complete the three numbers by DeepSpeed's own arithmetic; None while one that it needs is unknown."""
    dp = data_parallel_ranks(doc)
    total, micro, steps = (_count(doc, name) for name in (_TOTAL, _MICRO, _STEPS))
    if dp is None or (total is None and micro is None) or any(doc.is_auto(one) for one in (_TOTAL, _MICRO, _STEPS)):
        return None
    if total is not None and micro is not None:
        steps = total // micro // dp if steps is None else steps
    elif total is not None:
        steps = 1 if steps is None else steps
        micro = total // dp // steps
    else:
        micro = micro or 1
        steps = 1 if steps is None else steps
        total = micro * steps * dp
    return Batch(total=total, micro=micro, steps=steps, dp=dp)


def _count(doc: Document, name: str) -> int | None:
    value = doc.integer(name) if doc.has(name) else None
    return value if value is not None and 0 < value < _MOST else None


def check_batch(doc: Document) -> Iterator[Finding]:
    """Find batch sizes that do not multiply up, or that need a certain number of ranks."""
    bad = [name for name in (_TOTAL, _MICRO, _STEPS) if doc.has(name) and (doc.number(name) or 0) <= 0]
    yield from (mistake(name, f"{name}={doc.number(name)}", "it is 1 or more", "Use 1 or more.") for name in bad)
    yield from _elastic(doc)
    if bad:
        return
    if not doc.has(_TOTAL) and not doc.has(_MICRO):
        yield from _nothing(doc)
        return
    tp = doc.integer("tensor_parallel.autotp_size") or 1
    world = doc.facts.world_size
    if world is not None and tp > 1 and world % tp:
        yield mistake(
            "tensor_parallel.autotp_size",
            f"autotp_size={tp} with {world} ranks",
            "tensor-parallel groups are equally large",
            f"Use autotp_size={choices_text(divisors(world))}.",
        )
        return
    batch = batch_of(doc)
    if batch is None:
        yield from _without_ranks(doc)
    elif not batch.fits:
        yield _mismatch(doc, batch)
    else:
        yield from _right(doc, batch)


def _elastic(doc: Document) -> Iterator[Finding]:
    """Older versions: elastic training computes the batch sizes."""
    section = doc.values.get("elasticity")
    if not isinstance(section, Mapping) or section.get("enabled") is not True:
        return
    given = [name for name in (_TOTAL, _MICRO, _STEPS) if doc.has(name)]
    if given and section.get("ignore_non_elastic_batch_info") is not True:
        yield mistake(
            "elasticity",
            f"elasticity is enabled beside {', '.join(given)}",
            "elastic training computes the batch sizes from max_train_batch_size, micro_batch_sizes and the ranks",
            "Take one of them out, or set ignore_non_elastic_batch_info.",
            "deepspeed/elasticity (before 0.19)",
        )


def _nothing(doc: Document) -> Iterator[Finding]:
    if doc.is_auto(_TOTAL) or doc.is_auto(_MICRO):
        return
    yield risk(
        "",
        "neither train_batch_size nor train_micro_batch_size_per_gpu is given",
        "DeepSpeed refuses a configuration without both, unless what calls it (Trainer, Accelerate) adds them",
        "Add train_micro_batch_size_per_gpu, if this is the whole file.",
        _SOURCE,
    )


def _mismatch(doc: Document, batch: Batch) -> Finding:
    total, micro, dp = batch.total, batch.micro, batch.dp
    shown_steps = batch.steps
    fact = f"{total} != {micro} * {shown_steps} * {dp} = {micro * shown_steps * dp}"
    given = [name for name in (_TOTAL, _MICRO, _STEPS) if _count(doc, name) is not None]
    if not doc.has(_STEPS) and doc.has(_MICRO):
        fact = f"train_batch_size={total} is not divisible by micro-batch {micro} * {dp} ranks = {micro * dp}: {fact}"
    elif not doc.has(_MICRO):
        fact = f"train_batch_size={total} is not divisible by {dp} ranks * accumulation {shown_steps}: {fact}"
    return mistake(_TOTAL, fact, _RULE, _repair(doc, batch, given), f"{_SOURCE}; OpenRLHF issue 346")


def _repair(doc: Document, batch: Batch, given: list[str]) -> str:
    unit = (batch.micro if _MICRO in given else 1) * (batch.steps if _STEPS in given else 1) or 1
    whole = unit * batch.dp
    below, above = batch.total // whole * whole, -(-batch.total // whole) * whole
    choices = [str(one) for one in dict.fromkeys((below, above)) if one and one != batch.total]
    if _MICRO in given and _STEPS in given:
        choices = [str(whole)]
    ways = [f"train_batch_size={choices_text(choices)}"] if choices else []
    if batch.total % unit == 0:
        ranks = divisors(batch.total // unit) if batch.total // unit < 10**9 else []
        if _MICRO in given and _STEPS in given:
            ranks = [batch.total // unit]
        near = sorted(ranks, key=lambda one: (abs(one - batch.dp), -one))[:2]
        if near:
            ways.append(f"{choices_text(sorted(near))} data-parallel ranks instead of {batch.dp}")
    if _MICRO in given and _STEPS in given and batch.total % (batch.micro * batch.dp) == 0:
        ways.append(f"gradient_accumulation_steps={batch.total // (batch.micro * batch.dp)}")
    fix = f"Use {', or '.join(ways)}." if ways else "Give two of the three and leave one to DeepSpeed."
    if batch.dp == 1 and "!=" in doc.facts.words:
        fix += (
            " DeepSpeed saw 1 rank: start with deepspeed, torchrun or accelerate launch, not with python alone, and "
            "call deepspeed.init_distributed before the configuration is read."
        )
    return fix


def _without_ranks(doc: Document) -> Iterator[Finding]:
    total, micro, steps = (_count(doc, name) for name in (_TOTAL, _MICRO, _STEPS))
    if total is None:
        return
    unit = (micro or 1) * (steps or 1)
    autos = [name for name in (_TOTAL, _MICRO, _STEPS) if doc.is_auto(name)]
    if total % unit:
        fact = f"train_batch_size={total} is not divisible by {micro or 1} * {steps or 1} = {unit}"
        yield mistake(_TOTAL, fact, _RULE, f"Use train_batch_size={-(-total // unit) * unit}.", _SOURCE)
    elif autos:
        yield risk(
            _TOTAL,
            f"train_batch_size={total} is fixed, {' and '.join(autos)} left to 'auto'",
            "Trainer fills those from its arguments and refuses a product that differs",
            "Set train_batch_size to 'auto' too.",
            "transformers pull request 12021",
        )
    elif micro is not None and steps is not None:
        yield note(
            _TOTAL,
            f"{total} / ({micro} * {steps}) = {total // unit}",
            f"it fits {total // unit} data-parallel ranks only",
        )
    else:
        ranks = divisors(total // unit) if total // unit < 10**9 else []
        few = ", ".join(str(one) for one in ranks[:12])
        yield note(
            _TOTAL,
            f"train_batch_size={total} / {unit} = {total // unit}",
            f"the number of data-parallel ranks must divide it: {few}{', ...' if len(ranks) > 12 else ''}",
        )


def _right(doc: Document, batch: Batch) -> Iterator[Finding]:
    implied = [name for name in (_TOTAL, _MICRO, _STEPS) if not doc.has(name)]
    what = f"{batch.total} = {batch.micro} * {batch.steps} * {batch.dp}"
    rest = f" ({' and '.join(implied)} computed by DeepSpeed)" if implied else ""
    yield note(_TOTAL, f"{what}{rest}", "samples of a step = micro-batch * accumulation * data-parallel ranks")
    if batch.steps > 1 and doc.stage >= 2:
        yield note(
            _STEPS,
            f"stage {doc.stage} with {batch.steps} micro-batches",
            f"gradients are reduced {batch.steps} times a step, after each micro-batch, not once as in stages 0 and 1"
            + (f", and parameters gathered {2 * batch.steps} times" if doc.stage == 3 else ""),
        )
