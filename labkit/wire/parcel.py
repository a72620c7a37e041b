"""Calls and results as bytes: what the notebook packs and a rank opens, and the way back.

Functions of the notebook travel by value (cloudpickle), functions of a module by reference, and functions of the lab as
dotted names (`"labkit.rank.training:train"`), so that the notebook's side never imports what runs inside a rank.
"""

import builtins
import importlib
import io
import pickle
import types
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cloudpickle

from labkit.errors import Failure, PlanError, text_of

MAX_DEPTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call ended on one rank: a packed value, or a failure.

    Attributes:
        value: the pickled value.
        failure: what was raised instead.
        printed: whether output of the call travels beside this outcome.
        intact: whether the world's process group is still the one that the lab built.
    """

    value: bytes | None = None
    failure: Failure | None = None
    printed: bool = False
    intact: bool = True

    def dumps(self) -> bytes:
        """Pack for the way back to the notebook."""
        return pickle.dumps(self)


def pack_call(fn: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pack a function (or its dotted name) and its arguments.

    Raises:
        PlanError: one of them cannot be pickled; says which.
    """
    try:
        return _dumps((fn, args, kwargs))
    except Exception as error:
        raise PlanError(
            f"{_culprit(fn, args, kwargs)} cannot be sent to the ranks: {text_of(error)}. {_ADVICE}"
        ) from error
    except SystemExit as error:  # a __reduce__ that leaves must not end the notebook
        raise PlanError(f"{_culprit(fn, args, kwargs)} cannot be sent to the ranks: it raises SystemExit.") from error


def open_call(packed: bytes, namespace: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Open a packed call inside a rank; names that a notebook function does not bring are looked up in `namespace`.

    Raises:
        PlanError: there is no such function here, or an argument cannot be unpickled.
    """
    try:
        fn, args, kwargs = pickle.loads(packed)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = f"{type(error).__name__}: {text_of(error)}"
        raise PlanError(f"the function or an argument cannot be unpickled on the rank ({text}). {_ADVICE}.") from error
    if isinstance(fn, str):
        fn = resolve(fn)
    else:
        _lend_names(fn, namespace)
    return fn, args, kwargs


_ADVICE = "Send plain values, such as numbers, lists or tensors, and open files and locks inside the function"


def check_dotted(dotted: str) -> None:
    """Refuse a text that cannot be the dotted name of a function.

    Raises:
        PlanError: it does not read `package.module:function`.
    """
    module, colon, name = dotted.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise PlanError(
            f"{dotted!r} names no function: give the function itself, or a text such as 'package.module:function'."
        )


def resolve(dotted: str) -> Callable[..., Any]:
    """The function behind `package.module:name`.

    Raises:
        PlanError: there is none.
    """
    check_dotted(dotted)
    path, _, name = dotted.partition(":")
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path + ".").startswith(error.name + "."):
            raise  # the module is there, and imports one that is not
        raise PlanError(f"{dotted!r}: there is no module {path!r} here. Use 'package.module:function'.") from None
    fn = getattr(module, name, None)
    if not callable(fn):
        what = "is not there" if fn is None else f"is of type {type(fn).__name__}, not a function"
        raise PlanError(f"{dotted!r}: {name!r} of module {path!r} {what}. Use 'package.module:function'.")
    return fn  # type: ignore[no-any-return]


def load_outcome(packed: bytes) -> Outcome:
    """Open what a rank sent back; a broken parcel is a failure, never an exception here."""
    try:
        outcome = pickle.loads(packed)
    except Exception as error:
        return Outcome(
            failure=Failure(type=type(error).__name__, message=f"the answer cannot be read: {text_of(error)}")
        )
    return outcome  # type: ignore[no-any-return]


def load_value(outcome: Outcome) -> tuple[Any, Failure | None]:
    """The value that a rank returned, or why the notebook cannot read it."""
    try:
        return pickle.loads(outcome.value or b""), None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        text = f"its result cannot be unpickled in the notebook ({text_of(error)})"
        fix = "Return plain values, such as lists or numbers"
        return None, Failure(type=type(error).__name__, message=f"{text}. {fix}")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, except that code keeps the name of its file: errors on a rank then name the notebook's cell."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {types.CodeType: lambda code: _reduce_code(code)}, cloudpickle.Pickler.dispatch_table
    )


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, parts, *_ = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _named_code, (code.co_filename, make, parts)


def _named_code(filename: str, make: Callable[..., types.CodeType], parts: tuple[Any, ...]) -> types.CodeType:
    return make(*parts).replace(co_filename=filename)


def _dumps(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def _culprit(fn: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Which part of a call cannot be packed, in words."""
    named = [(f"argument {place}", value) for place, value in enumerate(args, 1)]
    named += [(f"argument {name}=", value) for name, value in kwargs.items()]
    for what, value in named:
        try:
            _dumps(value)
        except (Exception, SystemExit):
            return f"{what} of type {type(value).__name__}"
    name = getattr(fn, "__qualname__", type(fn).__name__)
    return f"the function {name}, or a variable that it uses,"


def _lend_names(fn: Callable[..., Any], namespace: dict[str, Any]) -> None:
    """Let a notebook's functions see what `%%px` cells defined on this rank, as a cell of that rank would.

    IPython's own `exit`, `quit` and `open` are no names of the learner's: they would end the rank.
    """
    left, seen = [fn], set[int]()
    while left:
        one = left.pop()
        one = getattr(one, "func", getattr(one, "__func__", one))  # a partial, a bound method
        if not isinstance(one, types.FunctionType) or one.__module__ != "__main__" or id(one) in seen:
            continue
        seen.add(id(one))
        for name in _names(one.__code__, MAX_DEPTH):
            if name not in one.__globals__ and name in namespace and not _of_ipython(name, namespace[name]):
                one.__globals__[name] = namespace[name]
        left += list(one.__globals__.values())
        left += [cell.cell_contents for cell in one.__closure__ or () if cell != types.CellType()]


def _of_ipython(name: str, value: Any) -> bool:
    home = str(getattr(value, "__module__", "")).partition(".")[0]
    return hasattr(builtins, name) and home in ("IPython", "ipykernel")


def _names(code: types.CodeType, depth: int) -> set[str]:
    names = set(code.co_names)
    if depth:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                names |= _names(constant, depth - 1)
    return names
