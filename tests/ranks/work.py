"""What tests ask ranks to do; a module, so that these functions travel by name."""

import logging
import os
import signal
import sys
import threading
import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

LARGE_BYTES = 100 << 20


def rank_number() -> int:
    return dist.get_rank()


def sum_of_ranks() -> float:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def arguments(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def large(num_bytes: int) -> np.ndarray:
    return np.full(num_bytes, dist.get_rank(), dtype=np.uint8)


def fails_on(rank: int) -> float:
    if dist.get_rank() == rank:
        raise ValueError(f"boom on {rank}")
    return sum_of_ranks()


def fails_everywhere() -> None:
    raise ValueError("everywhere")


def fails_differently() -> None:
    if dist.get_rank() % 2:
        raise ValueError("odd")
    raise ValueError("even")


class Mute(Exception):
    """An exception without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Unusual(BaseException):
    """Not an `Exception`."""


def raises_mute() -> None:
    raise Mute


def raises_unusual() -> None:
    raise Unusual("not an Exception")


def raises_huge() -> None:
    raise ValueError("x" * 10_000_000)


def raises_with_cause() -> None:
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError("outer") from error


def recurses() -> None:
    recurses()


def leaves(code: Any) -> None:
    sys.exit(code)


def calls_exit() -> None:
    exit()


def interrupts_itself() -> None:
    raise KeyboardInterrupt


def exits_at_once(rank: int, code: int) -> float:
    if dist.get_rank() == rank:
        os._exit(code)
    return sum_of_ranks()


def kills_itself(rank: int, number: int) -> float:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
        signal.pause()
    return sum_of_ranks()


def returns_a_lock() -> Any:
    return threading.Lock()


class LeavesInTheNotebook:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (3,)


class FailsInTheNotebook:
    """Cannot be put together again outside a rank."""

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}

    def __setstate__(self, state: dict[str, int]) -> None:
        if "LABKIT_RANK" not in os.environ:
            raise ValueError("only on ranks")


def returns_what_leaves() -> Any:
    return LeavesInTheNotebook()


def returns_what_fails() -> Any:
    return FailsInTheNotebook()


_kept: dict[str, Any] = {}


def makes_a_group() -> None:
    _kept["group"] = dist.new_group([0, 1, 2, 3])


def uses_the_group() -> float:
    x = torch.ones(1)
    dist.all_reduce(x, group=_kept["group"])
    return x.item()


def appends(value: int) -> list[int]:
    return [*_kept.setdefault("seen", []), _kept["seen"].append(value) or value]


def taken() -> list[int]:
    return list(_kept.pop("seen", []))


# -- output ----------------------------------------------------------------------------------------------------------


def speaks() -> None:
    rank = dist.get_rank()
    print("hello", rank)
    print("to stderr", rank, file=sys.stderr)
    print("in ", end="")
    sys.stdout.flush()
    time.sleep(0.01)
    print("parts")
    print("é ☃ 𝔘")
    print("two\nlines")


def speaks_junk() -> None:
    print("junk \udc80 \x00 end")
    sys.stdout.write("no newline")


def warns_and_logs() -> None:
    warnings.warn("careful", stacklevel=1)
    logging.getLogger("some.library").warning("logged on %d", dist.get_rank())


def prints_much(num_lines: int, length: int) -> str:
    for _ in range(num_lines):
        print("x" * length)
    return "done"


def draws_a_bar(num_steps: int) -> None:
    for step in range(num_steps):
        sys.stderr.write(f"\r{step + 1}/{num_steps} steps")
        sys.stderr.flush()
    sys.stderr.write("\n")


def writes_to_the_descriptor() -> None:
    os.write(1, b"of a library\n")


def sleep_long() -> None:
    """Longer than any test."""
    time.sleep(600)
