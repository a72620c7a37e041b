"""What a reader of a file has to say: single fields explained, and findings from the most serious to remarks."""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["SEVERITIES", "Field", "Finding", "by_severity", "mistake", "note", "risk"]

SEVERITIES = ("mistake", "risk", "note")
"""Most serious first: refused or not what is written; works, and may not be what was meant; worth knowing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One judgement about a file.

    Attributes:
        severity: "mistake", "risk" or "note".
        path: where, such as `zero_optimization.stage`; "" for the whole.
        fact: what was found, with its numbers.
        rule: why that matters.
        fix: what to do; "" where nothing is wrong.
        source: where the rule is written, or a public thread about it.
    """

    severity: str
    path: str
    fact: str
    rule: str
    fix: str = ""
    source: str = ""

    @property
    def message(self) -> str:
        """Fact, rule and fix in one to three sentences.

        >>> risk("a", "a=2", "a is 1", "Use a=1.").message
        'a=2: a is 1. Use a=1.'
        """
        return f"{self.fact}: {self.rule}.{f' {self.fix}' if self.fix else ''}"

    def __str__(self) -> str:
        return f"{self.severity}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a configuration, explained.

    Attributes:
        path: where it stands, such as `zero_optimization.stage`.
        value: what is in force, as text.
        default: what is in force where the field is left out, as text.
        unit: what a number counts, with bytes where it counts elements.
        meaning: what the field does.
        is_given: whether the file says it.
    """

    path: str
    value: str
    default: str
    unit: str
    meaning: str
    is_given: bool = True


def mistake(path: str, fact: str, rule: str, fix: str = "", source: str = "") -> Finding:
    """Make a finding of what is refused, or is not what the file says."""
    return Finding(severity="mistake", path=path, fact=fact, rule=rule, fix=fix, source=source)


def risk(path: str, fact: str, rule: str, fix: str = "", source: str = "") -> Finding:
    """Make a finding of what works and may not be what was meant."""
    return Finding(severity="risk", path=path, fact=fact, rule=rule, fix=fix, source=source)


def note(path: str, fact: str, rule: str, fix: str = "", source: str = "") -> Finding:
    """Make a finding of what is worth knowing."""
    return Finding(severity="note", path=path, fact=fact, rule=rule, fix=fix, source=source)


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort the most serious first, each once; equal ones stay in order.

    >>> [one.severity for one in by_severity([note("", "a", "b"), mistake("", "c", "d"), note("", "a", "b")])]
    ['mistake', 'note']
    """
    return tuple(sorted(dict.fromkeys(findings), key=lambda one: SEVERITIES.index(one.severity)))
