"""What a reader says about a file, as text for a shell and as plain data."""

import dataclasses
import html
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

from labkit.configuration import SEVERITIES, Field, Finding

__all__ = ["Verdict"]

_WIDTH = 100
_MOST_CELL = 46


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found in a file.

    Attributes:
        kind: what the file is, such as "DeepSpeed configuration".
        summary: one sentence.
        findings: most serious first.
        fields: the file field by field; () where it has none.
        details: what else a program may want, as plain data.
    """

    kind: str
    summary: str
    findings: tuple[Finding, ...]
    fields: tuple[Field, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def num_mistakes(self) -> int:
        """How many findings are mistakes."""
        return sum(one.severity == "mistake" for one in self.findings)

    @property
    def counts(self) -> str:
        """How many findings of each severity there are, such as "1 mistake, 2 notes".

        >>> Verdict(kind="log", summary="", findings=()).counts
        'nothing to say'
        """
        said = []
        for severity in SEVERITIES:
            number = sum(one.severity == severity for one in self.findings)
            if number:
                said.append(f"{number} {severity}{'s' if number > 1 else ''}")
        return ", ".join(said) or "nothing to say"

    def to_json(self) -> dict[str, object]:
        """Everything as plain data."""
        return {
            "kind": self.kind,
            "summary": self.summary,
            "findings": [dataclasses.asdict(one) | {"message": one.message} for one in self.findings],
            "fields": [dataclasses.asdict(one) for one in self.fields],
            **self.details,
        }

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.counts}"]
        lines += textwrap.wrap(self.summary, _WIDTH)
        for one in self.findings:
            lines += ["", f"{one.severity}{f'  {one.path}' if one.path else ''}"]
            lines += _wrapped(f"{one.fact}: {one.rule}.")
            lines += _wrapped(one.fix) if one.fix else []
            lines += _wrapped(f"[{one.source}]") if one.source else []
        if self.fields:
            lines += ["", "Fields; in parentheses what is in force without standing in the file:", *_table(self.fields)]
        return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _table(fields: tuple[Field, ...]) -> list[str]:
    """One line a field, under its section's name."""
    rows = [(one.path.rpartition(".")[2], one.value if one.is_given else f"({one.value})", one.unit) for one in fields]
    widths = [min(_MOST_CELL, max(len(row[column]) for row in rows)) for column in range(3)]
    lines: list[str] = []
    last = ""
    for one, row in zip(fields, rows, strict=True):
        section = one.path.rpartition(".")[0]
        if section != last and section:
            lines.append(f"  {section}")
        last = section
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        is_other = one.is_given and one.default not in ("", one.value)
        default = f" (default {one.default})" if is_other else ""
        lines.append(f"  {'  ' if section else ''}{text}  {one.meaning}{default}".rstrip())
    return lines
