"""Find out what a file is, and let its reader explain it."""

import os
import pathlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from labkit.errors import PlanError
from labkit.explain import deepspeed_configuration, deepspeed_log
from labkit.explain.verdict import Verdict
from labkit.spec import Model
from labkit.spec.checks import shown

__all__ = ["MOST_BYTES", "READERS", "Reader", "explain"]

MOST_BYTES = 64 << 20


class Explains(Protocol):
    """Turns a text into a verdict."""

    def __call__(self, text: str, *, model: Model | None, world_size: int | None) -> Verdict: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One kind of file.

    Attributes:
        kind: its name.
        looks: whether a text is of this kind.
        read: explains it.
    """

    kind: str
    looks: Callable[[str], bool]
    read: Explains


READERS: tuple[Reader, ...] = tuple(
    Reader(kind=module.KIND, looks=module.looks, read=module.read)
    for module in (deepspeed_configuration, deepspeed_log)
)
"""Asked in order; the first that recognises a file explains it."""

# What an unknown file may be: said, so that nobody wonders.
_OTHERS = (
    ("an empty file", r"\A\s*\Z"),
    ("an NCCL log", r"NCCL (?:INFO|WARN|TRACE)"),
    ("output of nccl-tests", r"# nThread \d+ nGpus|out-of-place\s+in-place|Avg bus bandwidth"),
    ("a flight-recorder dump", r'"pg_config"|"collective_seq_id"|"profiling_name"'),
    ("a Chrome trace", r'"traceEvents"|"ph"\s*:\s*"X"'),
    ("an NCCL topology", r"<system[ >].*<(?:cpu|gpu|pci)[ >]"),
    ("an Accelerate configuration", r"(?m)^(?:compute_environment|distributed_type|deepspeed_config)\s*:"),
    ("a model's configuration", r'"architectures"\s*:|"model_type"\s*:|"num_hidden_layers"\s*:'),
    ("a notebook", r'"nbformat"\s*:'),
    ("a Python traceback", r"Traceback \(most recent call last\)"),
    ("Python code", r"(?m)^(?:import \w|from \w+ import |def \w+\()"),
    ("TOML", r"\A\s*(?:#[^\n]*\n\s*)*\[+[\w.-]+\]+\s*\n"),
    ("JSON", r"\A\ufeff?\s*[\[{]"),
)


def explain(
    path: str | os.PathLike[str], *, model: Model | str | None = None, world_size: int | None = None
) -> Verdict:
    """Explain a file.

    Args:
        path: the file.
        model: what is trained, or a preset's name, where it is known.
        world_size: ranks, where they are known.

    Raises:
        PlanError: the file cannot be read, or is of no known kind.
    """
    text = _text(pathlib.Path(path))
    if isinstance(model, str):
        model = Model.preset(model)
    for reader in READERS:
        if reader.looks(text):
            try:
                return reader.read(text, model=model, world_size=world_size)
            except PlanError as error:
                raise PlanError(f"{path}: this {reader.kind} cannot be read: {error}") from None
    kinds = " and ".join(f"{reader.kind}s" for reader in READERS)
    looks_like = next((name for name, sign in _OTHERS if re.search(sign, text[:400_000], re.DOTALL)), "text")
    raise PlanError(f"{path} looks like {looks_like}: labkit explain knows {kinds}. Give one of those.")


def _text(path: pathlib.Path) -> str:
    try:
        if path.is_file() and path.stat().st_size > MOST_BYTES:
            size = path.stat().st_size / (1 << 20)
            raise PlanError(
                f"{path} has {size:.0f} MiB: at most {MOST_BYTES >> 20} are read. Cut out the part in question."
            )
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is no path"
        raise PlanError(f"{shown(str(path))} cannot be read: {why}. Give a file.") from None
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", errors="replace")
    if b"\0" in data[:4096]:
        raise PlanError(f"{path} is a binary file: labkit explain reads text. Give a configuration or a log.")
    return data.decode("utf-8", errors="replace")
