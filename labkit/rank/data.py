"""The text to train on, as bytes, and the samples of a step.

The samples of a step depend only on the text, the seed, the step and the global batch size: never on the layout.
"""

import functools
import hashlib
import os
import stat
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from labkit.errors import PlanError
from labkit.spec import Layout, Model

BYTE_VALUES = 256
LARGEST_TEXT = 1 << 30
"""Bytes of text that a rank may hold in memory (1 GiB)."""


def load(data: str | None, model: Model) -> Tensor:
    """Read the text that a model trains on.

    Args:
        data: a file, or a folder all of whose files (hidden ones apart) are read in the order of their paths; None =
            the Python standard library's source.
        model: says how much text a sample needs, and how many token values there are.

    Returns:
        uint8 [bytes of text].

    Raises:
        PlanError: nothing there, nothing readable, too little or too much text, or bytes beyond the vocabulary.
    """
    text = _standard_library() if data is None else _read(data)
    source = "the standard library's source" if data is None else f"data={_shown(data)}"
    needed = model.seq_len + 1
    if len(text) < needed:
        raise PlanError(
            f"{source} has {len(text)} bytes but a sample takes {needed}: seq_len={model.seq_len} tokens and the one "
            f"after. " + (f"Use seq_len={len(text) - 1} or more text." if len(text) > 1 else "Give a longer text.")
        )
    if model.vocab_size < BYTE_VALUES and (largest := int(text.max())) >= model.vocab_size:
        raise PlanError(
            f"{source} has the byte {largest} but vocab_size={model.vocab_size}: every byte is a token. "
            f"Use vocab_size={BYTE_VALUES}."
        )
    return text


def batch(text: Tensor, model: Model, layout: Layout, *, seed: int, step: int, dp_rank: int) -> tuple[Tensor, Tensor]:
    """Draw a step's samples and keep those of one dp rank.

    Returns:
        Tokens and targets (the tokens one further on), each int64 [samples of the dp rank, S].
    """
    digest = hashlib.sha256(f"samples {seed} {step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    starts = torch.randint(len(text) - model.seq_len, (layout.global_batch_size,), generator=generator)
    share = layout.global_batch_size // layout.dp
    own = starts[dp_rank * share : (dp_rank + 1) * share]
    samples = text[own[:, None] + torch.arange(model.seq_len + 1)].long()
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


@functools.cache
def _standard_library() -> Tensor:
    folder = Path(sysconfig.get_path("stdlib"))
    return _join(sorted(folder.glob("*.py")), str(folder))


def _read(data: str) -> Tensor:
    try:
        path = os.path.expanduser(data)
        kind = os.stat(path).st_mode if path else 0
    except FileNotFoundError:
        raise PlanError(
            f"data={_shown(data)} does not exist: give a file or a folder of files. {_where(data)}"
        ) from None
    except (OSError, ValueError) as error:
        raise PlanError(f"data={_shown(data)} is no usable path: {_reason(error)}. Give a file or a folder.") from None
    if not path:
        raise PlanError("data='' names nothing: give a file or a folder, or None for the standard library's source.")
    if stat.S_ISDIR(kind):
        return _join(_files(path, data), data)
    if not stat.S_ISREG(kind):
        raise PlanError(f"data={_shown(data)} is a device, pipe or socket: a text can be read twice. Give a file.")
    return _join([Path(path)], data)


def _files(folder: str, data: str) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise PlanError(f"data={_shown(data)} cannot be listed: {_reason(error)}. Choose what you may read.") from None

    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    files = sorted(path for path in found if path.is_file())
    if not files:
        raise PlanError(
            f"data={_shown(data)} is a folder with no files in it: there is nothing to train on. Give a file."
        )
    return files


def _join(files: list[Path], data: str) -> Tensor:
    try:
        size = sum(path.stat().st_size for path in files)
        if size > LARGEST_TEXT:
            raise PlanError(
                f"data={_shown(data)} has {size / 2**30:.1f} GiB but a rank holds its text in memory, at most "
                f"{LARGEST_TEXT / 2**30:.0f} GiB. Give a part of it."
            )
        text = bytearray().join(path.read_bytes() for path in files)
    except OSError as error:
        raise PlanError(f"data={_shown(data)} cannot be read: {_reason(error)}. Choose what you may read.") from None
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _where(data: str) -> str:
    return "" if os.path.isabs(data) else f" The ranks look in {_shown(os.getcwd())}."


def _reason(error: Exception) -> str:
    strerror = getattr(error, "strerror", None)
    return str(strerror or error).lower()


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:60]}...{text[-17:]}")
