"""A DeepSpeed configuration -> what it says field by field, what is wrong with it, and the plan that it stands for."""

import dataclasses
import html
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

from labkit.configuration import Document, Facts, Field, Finding, Review, parse, review
from labkit.configuration.batch import batch_of, data_parallel_ranks, num_stages
from labkit.errors import PlanError
from labkit.plan.build import build
from labkit.plan.plan import Plan
from labkit.plan.text import html_table
from labkit.spec import Layout, Model
from labkit.spec.checks import shown, whole

__all__ = ["Explanation", "from_deepspeed"]

_COLUMNS = ("field", "value", "default", "counts", "what it does")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A DeepSpeed configuration, explained.

    Attributes:
        plan: what it stands for, or None: `why_no_plan` says why.
        layout: how it is laid out, where that can be said.
        why_no_plan: what keeps it from being a plan; "" where there is one.
        fields: every field that the file gives, then what is in force without being said.
        findings: mistakes, risks and notes, most serious first.
    """

    plan: Plan | None
    layout: Layout | None
    why_no_plan: str
    fields: tuple[Field, ...]
    findings: tuple[Finding, ...]

    @property
    def mistakes(self) -> tuple[Finding, ...]:
        """The findings that DeepSpeed refuses, or does not do as the file says."""
        return tuple(one for one in self.findings if one.severity == "mistake")

    @property
    def summary(self) -> str:
        """One sentence: how many mistakes, and the layout."""
        count = len(self.mistakes)
        said = "no mistake" if count == 0 else "1 mistake" if count == 1 else f"{count} mistakes"
        layout = f"; layout {self.layout}" if self.layout is not None else ""
        return f"DeepSpeed configuration: {said}{layout}"

    def to_json(self) -> dict[str, object]:
        """Everything as plain data."""
        return {
            "summary": self.summary,
            "layout": None if self.layout is None else str(self.layout),
            "why_no_plan": self.why_no_plan,
            "findings": [dataclasses.asdict(one) | {"message": one.message} for one in self.findings],
            "fields": [dataclasses.asdict(one) for one in self.fields],
        }

    def __str__(self) -> str:
        lines = [self.summary, *(f"  {one}" for one in self.findings)]
        if self.why_no_plan:
            lines.append(f"  no plan: {self.why_no_plan}")
        rows = [
            (one.path, one.value if one.is_given else f"({one.value})", one.unit, one.meaning) for one in self.fields
        ]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        for row in rows:
            cells = [cell.ljust(min(width, 48)) for cell, width in zip(row, widths, strict=False)]
            lines.append(f"  {'  '.join(cells)}  {row[3]}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        items = "".join(
            f"<li><b>{one.severity}</b> <code>{html.escape(one.path)}</code> {html.escape(one.message)}</li>"
            for one in self.findings
        )
        rows = [
            [one.path, one.value if one.is_given else f"({one.value})", one.default, one.unit, one.meaning]
            for one in self.fields
        ]
        return f"<ul>{items}</ul>{html_table(self.summary, _COLUMNS, rows)}"


def from_deepspeed(
    config: Mapping[str, object] | str | os.PathLike[str],
    model: Model | str | None = None,
    world_size: int | None = None,
) -> Explanation:
    """Explain a DeepSpeed configuration and turn it into a plan.

    Top-level keys that begin with an underscore are remarks, as DeepSpeed ignores them; `_context` may say what a file
    does not: `world_size`, `model_hidden_size`, `launcher`, `deepspeed`, `error`.

    Args:
        config: the object, its JSON text, or a path. Comments and trailing commas are taken, as DeepSpeed takes them.
        model: what is trained, or a preset's name; None = unknown: then there is no plan.
        world_size: ranks; None = what the remarks or the batch sizes say.

    Raises:
        PlanError: no configuration could be read.

    >>> said = from_deepspeed({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, "tiny", 2)
    >>> str(said.layout), said.mistakes
    ('dp2 m4 b2', ())
    >>> wrong = from_deepspeed({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2}, world_size=7)
    >>> wrong.plan is None, wrong.findings[0].severity
    (True, 'mistake')
    """
    if isinstance(model, str):
        model = Model.preset(model)
    if model is not None and not isinstance(model, Model):
        raise PlanError(f"model={shown(model)} is no Model: use Model(...), a preset's name or None.")
    if world_size is not None:
        world_size = whole("world_size", world_size)
    found, known = _read(config)
    facts = Facts(world_size=world_size, model=model, hidden_size=model.d_model if model else None)
    return _explained(review(found, facts, known=known))


def _read(config: object) -> tuple[Mapping[str, object], list[Finding]]:
    if isinstance(config, Mapping):
        return config, []
    if isinstance(config, str) and config.lstrip("\ufeff \t\r\n").startswith(("{", "[", "//", "#", "/*")):
        return parse(config)
    if not isinstance(config, str | os.PathLike):
        raise PlanError(f"config={shown(config)} is no configuration: give an object, its JSON text or a path.")
    path = pathlib.Path(config)
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if isinstance(error, PlanError):
            raise PlanError(f"{path}: {error}") from None
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is no text in UTF-8"
        raise PlanError(f"{shown(str(path))} cannot be read: {why}. Give a path, or JSON text.") from None


def _explained(done: Review) -> Explanation:
    layout, why = _layout(done.document)
    plan = None
    model = done.document.facts.model
    first = next((one for one in done.findings if one.severity == "mistake"), None)
    if not why and first is not None:
        why = f"there is a mistake in it: {first.fact}."
    elif not why and model is None:
        why = "no model is given."
    elif not why and layout is not None and model is not None:
        try:
            plan = build(model, layout)
        except PlanError as error:
            why = str(error)
    return Explanation(plan=plan, layout=layout, why_no_plan=why, fields=done.fields, findings=done.findings)


def _layout(doc: Document) -> tuple[Layout | None, str]:
    """The layout that a configuration says, and what in it has no counterpart."""
    total, micro, steps = (
        doc.integer(name) if doc.has(name) else None
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    dp, batch = data_parallel_ranks(doc), batch_of(doc)
    if batch is not None and not batch.fits:
        return None, "its batch sizes do not multiply up."
    if batch is not None:
        dp, micro, steps = batch.dp, batch.micro, batch.steps
    elif dp is None and total and micro and steps and total % (micro * steps) == 0:
        dp = total // (micro * steps)
    if micro is None and total is None:
        return None, "it gives no batch size in numbers."
    if dp is None or micro is None:
        return None, "the number of ranks is not known: give world_size."
    params = doc.device("offload_param") != "none" and doc.stage == 3
    state = doc.device("offload_optimizer") != "none" and doc.stage > 0
    try:
        layout = Layout(
            dp=dp,
            tp=max(1, doc.integer("tensor_parallel.autotp_size") or 1),
            pp=num_stages(doc) or 1,
            zero_stage=doc.stage,
            num_microbatches=steps or 1,
            microbatch_size=micro,
            precision="fp32" if doc.precision == "fp32" else "bf16",
            offload="all" if params else "optimizer" if state else "none",
        )
    except PlanError as error:
        return None, str(error)
    return layout, _without_counterpart(doc, params=params, state=state)


def _without_counterpart(doc: Document, *, params: bool, state: bool) -> str:
    if doc.precision == "fp16":
        return "a layout is fp32, bf16 or fp8 and not fp16: bf16 stands for it here."
    if params and not state:
        return "a layout offloads the optimizer, or both, but not parameters alone: offload:all stands for it here."
    if num_stages(doc) is None:
        return "the file does not say how many stages its pipeline has."
    return ""
