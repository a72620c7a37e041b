"""Which functions answer a question, among what was handed to `check` and what stands beside it in the notebook."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.core.getipython import get_ipython

from labkit.cluster.checks import shown
from labkit.errors import PlanError
from labkit.exercise import Exercise

__all__ = ["answers_of"]


def answers_of(exercise: Exercise, given: Sequence[Any]) -> dict[str, Callable[..., Any]]:
    """The functions by name, as far as there are any: given in any order, or defined where a given one is.

    Args:
        exercise: the question; it names its functions.
        given: what the learner handed in.

    Raises:
        PlanError: something handed in is no answer to this question.
    """
    names = exercise.answers
    if len(given) > len(names):
        count = f"{len(names)} function{'s' * (len(names) != 1)}"
        raise PlanError(
            f"{len(given)} answers for {exercise.question}, which asks for {count}: {' and '.join(names)}. "
            f"Use lk.grade.check({exercise.question!r}, {', '.join(names)})."
        )
    found: dict[str, Callable[..., Any]] = {}
    strangers = []
    for place, one in enumerate(given, 1):
        _check_is_function(exercise, place, one)
        name = _name(one, names)
        if name in found:
            raise PlanError(f"{name} was handed in twice: each function of {exercise.question} is given once.")
        if name is None:
            strangers.append(one)
        else:
            found[name] = one
    if strangers and len(names) > 1:
        raise PlanError(
            f"{shown(strangers[0])} is none of {' and '.join(names)}: {exercise.question} knows its functions by name. "
            f"Use lk.grade.check({exercise.question!r}, {', '.join(names)})."
        )
    if strangers:
        found[names[0]] = strangers[0]
    return _completed(names, found)


def _completed(names: Sequence[str], found: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """All functions in the exercise's order; those that were not given are looked up beside the given ones."""
    beside = [getattr(one, "__globals__", {}) for one in found.values()] + [_notebook()]
    for name in names:
        here = next((space[name] for space in beside if callable(space.get(name))), None)
        if name not in found and here is not None:
            found[name] = here
    # What `torch.compile` makes of a function cannot be sent to ranks: the function itself is tried.
    return {name: getattr(found[name], "_torchdynamo_orig_callable", found[name]) for name in names if name in found}


def _check_is_function(exercise: Exercise, place: int, one: Any) -> None:
    if hasattr(type(one), "under_way"):
        raise PlanError(
            f"answer {place} are ranks: they go by name. Use check({exercise.question!r}, ..., ranks=ranks)."
        )
    if not callable(one):
        raise PlanError(
            f"answer {place}, {shown(one)}, is of type {type(one).__name__}, not a function: hand in the function "
            f"itself, without calling it. Use lk.grade.check({exercise.question!r}, {', '.join(exercise.answers)})."
        )


def _name(one: Any, names: Sequence[str]) -> str | None:
    """By which of the names a function goes: its own, or the one under which the notebook holds it."""
    own = getattr(getattr(one, "func", one), "__name__", None)
    if own in names:
        return str(own)
    return next((name for name in names if _notebook().get(name) is one), None)


def _notebook() -> Mapping[str, Any]:
    """The names of the notebook, or of the script."""
    shell = get_ipython()
    return shell.user_ns if shell is not None else vars(sys.modules["__main__"])
