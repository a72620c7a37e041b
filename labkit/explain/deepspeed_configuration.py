"""DeepSpeed configurations."""

import re

from labkit.configuration import parse
from labkit.configuration.known import KEYS, REMOVED, RENAMED, nearest_key
from labkit.errors import PlanError
from labkit.explain.verdict import Verdict
from labkit.plan import from_deepspeed
from labkit.spec import Model

__all__ = ["KIND", "looks", "read"]

KIND = "DeepSpeed configuration"

_NAMES = {path for path in (*KEYS, *REMOVED, *RENAMED) if "." not in path and path not in ("optimizer", "scheduler")}
_NAME = re.compile(r"[\"']?(\w+)[\"']?\s*:")
_START = re.compile(r"^(?:\ufeff|\s|//[^\n]*\n|#[^\n]*\n|/\*.*?\*/)*\{", re.DOTALL)


def looks(text: str) -> bool:
    """Whether a text is an object with at least one of DeepSpeed's names, nearly so, or an empty one."""
    if not _START.match(text):
        return False
    try:
        names = set(parse(text)[0])
    except PlanError:  # broken, but may be one
        return bool(set(_NAME.findall(text[:200_000])) & _NAMES)
    if not names or names & _NAMES:
        return True
    if names & {"optimizer", "scheduler"} and '"params"' in text:
        return True
    near = (nearest_key(name) for name in list(names)[:50] if len(name) > 11)
    return any(one is not None and "." not in one for one in near)


def read(text: str, *, model: Model | None, world_size: int | None) -> Verdict:
    """Explain a configuration.

    Raises:
        PlanError: it cannot be read.
    """
    said = from_deepspeed(text, model, world_size)
    summary = f"Layout: {said.layout}." if said.layout is not None else ""
    if said.why_no_plan:
        summary = f"{summary} No plan: {said.why_no_plan}".strip()
    details = {key: value for key, value in said.to_json().items() if key in ("layout", "why_no_plan")}
    return Verdict(kind=KIND, summary=summary, findings=said.findings, fields=said.fields, details=details)
