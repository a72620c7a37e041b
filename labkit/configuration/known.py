"""The keys that DeepSpeed reads, from `deepspeed_keys.json`; a test compares that file with the installed library."""

import difflib
import json
from dataclasses import dataclass
from importlib import resources

__all__ = [
    "CLOSED",
    "FREE",
    "KEYS",
    "REMOVED",
    "RENAMED",
    "SECTIONS",
    "STAGE_3_KEYS",
    "VERSION",
    "Key",
    "elsewhere",
    "full_name",
    "nearest_key",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key that DeepSpeed reads.

    Attributes:
        path: where it stands.
        kind: "integer", "number", "flag", "text", "list", "object" or "any".
        default: what is in force without it; None = depends, or nothing.
        unit: what a number counts.
        meaning: what it does.
    """

    path: str
    kind: str
    default: object
    unit: str
    meaning: str


_TABLE = json.loads(resources.files("labkit.configuration").joinpath("deepspeed_keys.json").read_text("utf-8"))

VERSION: str = _TABLE["version"]
KEYS: dict[str, Key] = {row["path"]: Key(**row) for row in _TABLE["keys"]}
CLOSED: frozenset[str] = frozenset(_TABLE["closed_sections"])
"""Sections where DeepSpeed refuses an unknown key; elsewhere it ignores it in silence."""
FREE: frozenset[str] = frozenset(_TABLE["free_sections"])
"""Sections whose content this table does not list."""
RENAMED: dict[str, str] = _TABLE["renamed"]
REMOVED: dict[str, str] = _TABLE["removed"]
SECTIONS: frozenset[str] = frozenset(path for path, key in KEYS.items() if key.kind == "object")
STAGE_3_KEYS: frozenset[str] = frozenset(
    path for path, key in KEYS.items() if path.startswith("zero_optimization.") and "(stage 3)" in key.meaning
)

_CLOSE = 0.78  # of difflib: "zero_optimisation" is near, "model_type" is not near to "data_types"
_PREFIX = "zero_optimization.stage3_"
# DeepSpeed takes these with and without `stage3_`.
_SHORT = {
    f"zero_optimization.{path.removeprefix(_PREFIX)}": path
    for path in KEYS
    if path.startswith(_PREFIX) and "gather_fp16" not in path
}


def full_name(path: str) -> str:
    """Return the spelling of the table for a path.

    >>> full_name("zero_optimization.prefetch_bucket_size")
    'zero_optimization.stage3_prefetch_bucket_size'
    """
    return _SHORT.get(path, path)


def elsewhere(path: str) -> str | None:
    """Return the path at which a key of this name is known, if it stands in the wrong section.

    >>> elsewhere("zero_optimization.aio"), elsewhere("offload_optimizer")
    ('aio', 'zero_optimization.offload_optimizer')
    """
    name = path.rsplit(".", 1)[-1]
    if name in {"enabled", "device", "type", "params", "dtype"}:
        return None
    known = [*KEYS, *RENAMED]
    found = [one for one in known if one != path and one.rsplit(".", 1)[-1] == name]
    return min(found, key=lambda one: (one.count("."), one)) if found else None


def nearest_key(path: str) -> str | None:
    """Return the known key that was likely meant: in the same section first, then anywhere.

    >>> nearest_key("train_micro_batch_size_per_gpus")
    'train_micro_batch_size_per_gpu'
    """
    section, _, name = path.rpartition(".")
    siblings = {one.rsplit(".", 1)[-1]: one for one in KEYS if one.rpartition(".")[0] == section}
    if found := _near(name, list(siblings)):
        return siblings[found]
    names = {one.rsplit(".", 1)[-1]: one for one in reversed(KEYS)}
    found = _near(name, [one for one in names if len(one) > 7])
    return names[found] if found else None


def _near(name: str, options: list[str]) -> str | None:
    """The nearest of options, of those that are likely a slip of the pen."""
    plain = name.replace("-", "_").lower()
    if plain in options:
        return plain
    close = difflib.get_close_matches(plain[:80], options, n=1, cutoff=_CLOSE)
    if close:
        return close[0]
    parts = [one for one in options if one.startswith(plain) or plain.startswith(one)]
    return next((one for one in parts if min(len(one), len(plain)) > 0.55 * max(len(one), len(plain), 9)), None)
