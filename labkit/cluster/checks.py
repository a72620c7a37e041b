"""Checks of what a learner hands to `Ranks` and `start`."""

import numbers
import operator
from collections.abc import Iterable
from typing import Any

from labkit.errors import PlanError

MAX_TIMEOUT_S = 7 * 24 * 3600.0
MAX_SHOWN = 60


def shown(value: Any) -> str:
    """A value as it reads in a message: its repr, cut, even where the repr itself raises."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def check_count(name: str, value: Any, least: int, most: int) -> int:
    """A whole number within bounds."""
    try:
        number = operator.index(None if isinstance(value, bool) else value)  # type: ignore[arg-type]
    except TypeError:
        kind = f"is of type {type(value).__name__}"
        fix = f"a whole number from {least} to {most} is needed"
        raise PlanError(f"{name}={shown(value)} {kind}: {fix}.") from None
    if not least <= number <= most:
        nearest = min(max(number, least), most)
        raise PlanError(f"{name}={shown(value)} is outside {least} to {most}. Use {name}={nearest}.")
    return number


def check_timeout(value: Any) -> float:
    """Seconds: a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        kind = type(value).__name__
        raise PlanError(f"timeout_s={shown(value)} is of type {kind}: seconds, a number above 0, are needed.")
    if not 0 < value <= MAX_TIMEOUT_S:  # type: ignore[operator]  # nan is in no interval
        limit = f"is not above 0 and at most {MAX_TIMEOUT_S:.0f} s"
        raise PlanError(f"timeout_s={shown(value)} {limit}. Use for instance timeout_s=60.")
    return float(value)


def check_rank(rank: Any, world_size: int) -> int:
    """The number of a rank that exists."""
    return check_count("rank", rank, 0, world_size - 1)


def check_ranks(ranks: Iterable[int] | None, world_size: int) -> list[int]:
    """Where to run: all ranks, or the given ones, each once."""
    if ranks is None:
        return list(range(world_size))
    if isinstance(ranks, str | bytes) or not isinstance(ranks, Iterable):
        kind = type(ranks).__name__
        raise PlanError(f"ranks={shown(ranks)} is of type {kind}: a list of ranks is needed, such as ranks=[0, 1].")
    found = [check_rank(rank, world_size) for rank in ranks]
    if not found:
        raise PlanError("ranks=[] names no rank: at least one is needed, such as ranks=[0]; leave ranks out for all.")
    if len(set(found)) < len(found):
        once = list(dict.fromkeys(found))
        raise PlanError(f"ranks={found} names {len(once)} ranks in {len(found)} places: each once. Use ranks={once}.")
    return found


def check_choice(name: str, value: Any, choices: tuple[str | None, ...]) -> None:
    """One of a few words."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise PlanError(f"{name}={shown(value)} is not one of {known}.")
