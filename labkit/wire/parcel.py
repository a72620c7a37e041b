"""Calls and results as bytes: what the notebook packs and a rank opens, and the way back.

Functions of the notebook travel by value (cloudpickle), functions of a module by reference, and functions of the lab as
dotted names (`"labkit.rank.training:train"`), so that the notebook's side never imports what runs inside a rank.
"""

import importlib
import io
import pickle
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from labkit.errors import Failure

MAX_DEPTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call ended on one rank: a packed value, or a failure.

    Attributes:
        value: the pickled value.
        failure: what was raised instead.
        printed: whether output of the call travels beside this outcome.
    """

    value: bytes | None = None
    failure: Failure | None = None
    printed: bool = False

    def dumps(self) -> bytes:
        """Pack for the way back to the notebook."""
        return pickle.dumps(self)


def pack_call(fn: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pack a function (or its dotted name) and its arguments."""
    stream = io.BytesIO()
    cloudpickle.dump((fn, args, kwargs), stream)
    return stream.getvalue()


def open_call(
    packed: bytes, namespace: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Open a packed call inside a rank; names that a notebook function does not bring are looked up in `namespace`."""
    fn, args, kwargs = pickle.loads(packed)
    if isinstance(fn, str):
        fn = resolve(fn)
    elif isinstance(fn, types.FunctionType):
        _lend_names(fn, namespace)
    return fn, args, kwargs


def resolve(dotted: str) -> Callable[..., Any]:
    """The function behind `package.module:name`."""
    module, _, name = dotted.partition(":")
    fn = getattr(importlib.import_module(module), name)
    if not callable(fn):
        raise TypeError(f"{dotted} is a {type(fn).__name__}, not a function")
    return fn  # type: ignore[no-any-return]


def load_outcome(packed: bytes) -> Outcome:
    """Open what a rank sent back; a broken parcel is a failure, never an exception here."""
    try:
        outcome = pickle.loads(packed)
    except Exception as error:
        return Outcome(failure=Failure(type=type(error).__name__, message=f"the answer cannot be read: {error}"))
    return outcome  # type: ignore[no-any-return]


def load_value(outcome: Outcome) -> tuple[Any, Failure | None]:
    """The value that a rank returned, or why the notebook cannot read it."""
    try:
        return pickle.loads(outcome.value or b""), None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        text = f"its result cannot be unpickled in the notebook ({error}). Return plain values, such as lists or numbers"
        return None, Failure(type=type(error).__name__, message=text)


def _lend_names(fn: types.FunctionType, namespace: dict[str, Any]) -> None:
    """Let a notebook's function see what `%%px` cells defined on this rank, as a cell of that rank would."""
    if fn.__module__ != "__main__":
        return
    for name in _names(fn.__code__, MAX_DEPTH):
        if name not in fn.__globals__ and name in namespace:
            fn.__globals__[name] = namespace[name]


def _names(code: types.CodeType, depth: int) -> set[str]:
    names = set(code.co_names)
    if depth:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                names |= _names(constant, depth - 1)
    return names
