"""Checks of single values. Each returns the value in its plain type or raises `PlanError` with fact, rule and fix."""

import difflib
import math
import numbers
import operator
from collections.abc import Iterable, Sequence

from labkit.errors import PlanError

__all__ = ["choice", "choices_text", "divisors", "flag", "nearest", "number", "shown", "whole"]

LARGEST = 2**31 - 1
"""Largest size that a tensor's dimension or a count may have."""

_SHOWN_CHARACTERS = 60


def shown(value: object) -> str:
    """Write a value for a message: short, on one line, whatever it is.

    >>> shown("dp2")
    "'dp2'"
    >>> len(shown("x" * 1000)) < 70
    True
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**24:
        return f"{'-' if value < 0 else ''}(an integer of {value.bit_length()} bits)"
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def whole(name: str, value: object, *, minimum: int = 1, maximum: int = LARGEST) -> int:
    """Return `value` as an int within `minimum..maximum`.

    Anything with `__index__` counts (numpy's integers too); bool and float do not.

    >>> whole("dp", 2)
    2
    >>> whole("dp", 2.0)
    Traceback (most recent call last):
        ...
    labkit.errors.PlanError: dp=2.0 is a float: dp is a whole number. Use dp=2.
    >>> whole("dp", "4")
    Traceback (most recent call last):
        ...
    labkit.errors.PlanError: dp='4' is a str: dp is a whole number. Use dp=4.
    """
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        meant = _meant(value)
        fix = minimum if meant is None or not minimum <= meant <= maximum else meant
        raise PlanError(f"{name}={shown(value)} is {_kind(value)}: {name} is a whole number. Use {name}={fix}.")
    try:
        result = operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # arrays have __index__ but only those of one element answer it
        raise PlanError(f"{name}={shown(value)} is {_kind(value)}: {name} is one whole number.") from None
    if result < minimum:
        raise PlanError(f"{name}={shown(result)} is below {minimum}: {name} starts there. Use {name}={minimum}.")
    if result > maximum:
        raise PlanError(f"{name}={shown(result)} is above {maximum}: {name} ends there. Use {name}={maximum} or less.")
    return result


def number(name: str, value: object, *, minimum: float = 0.0, below: float = math.inf, positive: bool = False) -> float:
    """Return `value` as a finite float with `minimum <= value < below` (and `> 0` where `positive`).

    >>> number("learning_rate", 1)
    1.0
    >>> number("learning_rate", float("nan"))
    Traceback (most recent call last):
        ...
    labkit.errors.PlanError: learning_rate=nan is not a finite number: learning_rate must be 0 or more.
    """
    rule = f"more than {minimum:g}" if positive else f"{minimum:g} or more"
    if below != math.inf:
        rule = f"{rule} and below {below:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise PlanError(f"{name}={shown(value)} is {_kind(value)}: {name} is a number, {rule}.")
    try:
        result = float(value)
    except (OverflowError, ValueError):
        result = math.inf
    if not math.isfinite(result):
        raise PlanError(f"{name}={shown(value)} is not a finite number: {name} must be {rule}.")
    if result < minimum or result >= below or (positive and result == minimum):
        raise PlanError(f"{name}={shown(value)} is out of range: {name} must be {rule}.")
    return result


def choice(name: str, value: object, options: Sequence[str]) -> str:
    """Return `value` if it is one of `options`.

    >>> choice("norm", "rmss", ("rms", "layer"))
    Traceback (most recent call last):
        ...
    labkit.errors.PlanError: norm='rmss' is unknown: norm is 'rms' or 'layer'. Did you mean 'rms'?
    """
    if isinstance(value, str) and value in options:
        return str(value)
    guess = nearest(value, options) if isinstance(value, str) else None
    hint = f" Did you mean {guess!r}?" if guess else f" Use {name}={options[0]!r}."
    kind = "is unknown" if isinstance(value, str) else f"is {_kind(value)}"
    quoted = choices_text([repr(option) for option in options])
    raise PlanError(f"{name}={shown(value)} {kind}: {name} is {quoted}.{hint}")


def flag(name: str, value: object) -> bool:
    """Return `value` if it is True or False.

    >>> flag("bias", 1)
    Traceback (most recent call last):
        ...
    labkit.errors.PlanError: bias=1 is an int: bias is True or False. Use bias=True.
    """
    if isinstance(value, bool):
        return value
    fix = (isinstance(value, int) and value == 1) or (isinstance(value, str) and value.lower() in ("true", "yes", "1"))
    raise PlanError(f"{name}={shown(value)} is {_kind(value)}: {name} is True or False. Use {name}={fix}.")


def nearest(text: str, options: Iterable[str]) -> str | None:
    """Return the option that `text` most likely meant, if any is close.

    >>> nearest("lama3-8b", ["llama3-8b", "tiny"])
    'llama3-8b'
    """
    close = difflib.get_close_matches(text[:80].lower(), list(options), n=1, cutoff=0.6)
    return close[0] if close else None


def choices_text(items: Iterable[object]) -> str:
    """Write alternatives as a person would.

    >>> choices_text([1, 2, 3, 6])
    '1, 2, 3 or 6'
    """
    names = [str(item) for item in items]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def divisors(value: int) -> list[int]:
    """Return the numbers that divide `value`, in order.

    >>> divisors(6)
    [1, 2, 3, 6]
    """
    small = [divisor for divisor in range(1, math.isqrt(value) + 1) if value % divisor == 0]
    return sorted({*small, *(value // divisor for divisor in small)})


def _kind(value: object) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _meant(value: object) -> int | None:
    """The whole number that was likely meant by 2.0 or "2"; None when there is none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 10:
        return int(value)
    return None
