"""Paths of checkpoints in a configuration, and activation checkpoints."""

import re
from collections.abc import Iterator, Mapping

from labkit.configuration.document import Document
from labkit.configuration.finding import Finding, mistake, note
from labkit.spec.checks import shown

__all__ = ["check_restoring"]

_TAG = re.compile(r"^(?P<parent>.*)[/\\](?P<tag>global_step\d+|step[_-]?\d+|checkpoint-\d+)[/\\]?$")
_LOADS = re.compile(r"load|resume|restore", re.IGNORECASE)


def check_restoring(doc: Document) -> Iterator[Finding]:
    """Find load paths that silently start from scratch, and activation settings that do nothing by themselves."""
    yield from _load_paths(doc.given, 0, "")
    section = doc.values.get("activation_checkpointing")
    if isinstance(section, Mapping) and section:
        yield note(
            "activation_checkpointing",
            "activation_checkpointing is configured",
            "it switches nothing on: it only counts where the model calls deepspeed.checkpointing.checkpoint",
            "With Transformers models use gradient_checkpointing_enable().",
            "deepspeed/runtime/activation_checkpointing/checkpointing.py",
        )


def _load_paths(given: Mapping[str, object], depth: int, section: str) -> Iterator[Finding]:
    for name, value in given.items():
        path = f"{section}.{name}" if section else str(name)
        if isinstance(value, Mapping) and depth < 3:
            yield from _load_paths(value, depth + 1, path)
        match = _TAG.match(value) if isinstance(value, str) and _LOADS.search(str(name)) else None
        if match and match["tag"].startswith("global_step"):
            yield mistake(
                path[:100],
                f"{str(name)[:60]}={shown(value)} ends in a tag",
                "load_checkpoint takes the parent folder and looks for a file 'latest' there: with the tag inside it "
                "warns, returns (None, None), and training starts from scratch",
                f"Use load_dir={shown(match['parent'])} and tag={match['tag']!r}, and check the path that it returns.",
                "deepspeed/runtime/engine.py load_checkpoint",
            )
