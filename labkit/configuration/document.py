"""A configuration as read: its values under their present names, with defaults, whatever the types are."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from labkit.configuration.facts import Facts, facts_of_remarks, is_remark
from labkit.configuration.known import FREE, KEYS, SECTIONS, full_name

__all__ = ["LARGEST", "Document", "document", "walk"]

LARGEST = 2**63
"""No count is as large: DeepSpeed keeps them in 64 bits."""

_TRUE = ("true", "yes", "on", "1", "t", "y")
_FALSE = ("false", "no", "off", "0", "f", "n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A configuration and what is known besides.

    Attributes:
        given: the object as the file has it, without remarks.
        values: path -> value of every field the file gives, under its present name.
        facts: what is known besides.
    """

    given: Mapping[str, object]
    values: Mapping[str, object]
    facts: Facts

    def has(self, path: str) -> bool:
        """Whether the file gives a field a value of its own: not "auto", not null."""
        return self.values.get(path) not in (None, "auto")

    def is_auto(self, path: str) -> bool:
        """Whether a field is left to the integration."""
        return self.values.get(path) == "auto"

    def integer(self, path: str) -> int | None:
        """The whole number in force; None where there is none."""
        value = self.number(path)
        return int(value) if value is not None and value == math.floor(value) else None

    def number(self, path: str) -> float | int | None:
        """The number in force; None where there is none, or one that no count reaches."""
        value = self._value(path)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value if abs(value) < LARGEST else None

    def flag(self, path: str) -> bool:
        """Whether a flag is on; False where it is "auto" or no flag."""
        value = self._value(path)
        if isinstance(value, str):
            return value.lower() in _TRUE
        return value is True or (isinstance(value, int) and value == 1)

    def text(self, path: str) -> str:
        """The text in force; "" where there is none."""
        value = self._value(path)
        return value if isinstance(value, str) and value != "auto" else ""

    @property
    def stage(self) -> int:
        """The ZeRO stage in force; 0 where it is none of 0 to 3."""
        stage = self.integer("zero_optimization.stage")
        return stage if stage in (1, 2, 3) else 0

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight and a gradient: 2 in fp16 and bf16, else 4."""
        return 4 if self.precision == "fp32" else 2

    @property
    def precision(self) -> str:
        """One of "fp16", "bf16" and "fp32"; what is "auto" counts where nothing is on."""
        on = [name for name in ("bf16", "fp16") if self.flag(f"{name}.enabled")]
        auto = [name for name in ("bf16", "fp16") if self.is_auto(f"{name}.enabled")]
        return (on or auto or ["fp32"])[0]

    def device(self, what: str) -> str:
        """Where "offload_param" or "offload_optimizer" puts its part: "none", "cpu" or "nvme"."""
        return self.text(f"zero_optimization.{what}.device") or "none"

    def _value(self, path: str) -> object:
        value = self.values.get(path)
        if value is None or value == "auto":
            key = KEYS.get(path)
            return key.default if key and value is None else None
        return value


def document(found: Mapping[str, object], facts: Facts) -> Document:
    """Read an object: remarks become facts, old names become new ones."""
    remarks = {str(name): value for name, value in found.items() if is_remark(str(name))}
    given = {str(name): value for name, value in found.items() if not is_remark(str(name))}
    values = {full_name(path): value for path, value in walk(given)}
    _renew(values)
    return Document(given=given, values=values, facts=facts_of_remarks(remarks, facts))


def walk(given: Mapping[str, object], section: str = "") -> Iterator[tuple[str, object]]:
    """Every field of the file as (path, value), sections first; sections that the table does not list stay whole."""
    for name, value in given.items():
        path = f"{section}.{name}" if section else str(name)
        yield path, value
        known = path in SECTIONS or path == "bfloat16"
        if isinstance(value, Mapping) and known and path not in FREE:
            yield from walk(value, path)


def _renew(values: dict[str, object]) -> None:
    """Old spellings take the place of new ones that are not there."""
    zero = values.get("zero_optimization")
    if isinstance(zero, bool):
        values["zero_optimization.stage"] = int(zero)
    for name in ("enabled", "immediate_grad_update", "check_grad_overflow"):
        if f"bfloat16.{name}" in values:
            values.setdefault(f"bf16.{name}", values[f"bfloat16.{name}"])
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if values.get(f"zero_optimization.{old}") in (True, "true"):
            values.setdefault(f"zero_optimization.{new}", {"device": "cpu"})
            values.setdefault(f"zero_optimization.{new}.device", "cpu")
    for path, value in list(values.items()):
        if path.endswith("_device") or not isinstance(value, str):
            continue
        if path.endswith(".device"):
            values[path] = value.lower() if value.lower() in ("none", "cpu", "nvme") else value
