"""Checks of what a learner hands to `Ranks` and `start`."""

import math
from collections.abc import Iterable
from typing import Any

from labkit.errors import PlanError

MAX_TIMEOUT_S = 7 * 24 * 3600.0


def check_count(name: str, value: Any, least: int, most: int) -> int:
    """A whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"{name}={value!r} is a {type(value).__name__}: a whole number from {least} to {most} is needed.")
    if not least <= value <= most:
        nearest = min(max(value, least), most)
        raise PlanError(f"{name}={value} is outside {least} to {most}. Use {name}={nearest}.")
    return value


def check_timeout(value: Any) -> float:
    """Seconds: a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanError(f"timeout_s={value!r} is a {type(value).__name__}: seconds, a number above 0, are needed.")
    if not math.isfinite(value) or value <= 0 or value > MAX_TIMEOUT_S:
        raise PlanError(f"timeout_s={value} is not within 0 to {MAX_TIMEOUT_S:g} s. Use for instance timeout_s=60.")
    return float(value)


def check_rank(rank: Any, world_size: int) -> int:
    """The number of a rank that exists."""
    return check_count("rank", rank, 0, world_size - 1)


def check_ranks(ranks: Iterable[int] | None, world_size: int) -> list[int]:
    """Where to run: all ranks, or the given ones, each once."""
    if ranks is None:
        return list(range(world_size))
    if isinstance(ranks, int | str | bytes) or not isinstance(ranks, Iterable):
        raise PlanError(f"ranks={ranks!r} is a {type(ranks).__name__}: a list of ranks is needed, such as ranks=[0, 1].")
    found = [check_rank(rank, world_size) for rank in ranks]
    if not found or len(set(found)) < len(found):
        raise PlanError(f"ranks={found} names {len(set(found))} ranks in {len(found)} places: name each rank once.")
    return found
