"""What casts to FP8 did in a run, tensor by tensor and step by step."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.spec import Fp8
from labkit.spec.fp8 import ROLES

__all__ = ["PRODUCTS", "Fp8Cast", "Fp8Record"]

PRODUCTS = {"input": "output", "weight": "gradient of the input", "gradient": "gradient of the weight"}
"""The product whose error stands with each tensor: input x weight, gradient x weight, gradient x input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Cast:
    """What the casts of one tensor did in the last micro-batch of a step, over all ranks.

    Attributes:
        step: of the run.
        layer: which transformer layer.
        matrix: such as "attention.query".
        role: "input", "weight" or "gradient" (of the output).
        amax: the largest magnitude.
        scale: what it was multiplied by; of a tensor with many scales, that of its largest entry.
        underflow: share of values that became 0 and were not.
        saturation: share of values that were cut off at the format's largest number.
        error: of the product that `PRODUCTS` names: the norm of its difference from the product in bf16, relative.

    A number that was not finite is nan.
    """

    step: int
    layer: int
    matrix: str
    role: str
    amax: float
    scale: float
    underflow: float
    saturation: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Record:
    """The casts of a run, in order of steps, layers and matrices.

    Attributes:
        recipe: how it cast.
        casts: one for each step, matrix and role.
    """

    recipe: Fp8
    casts: tuple[Fp8Cast, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """The recorded steps, in order."""
        return tuple(dict.fromkeys(cast.step for cast in self.casts))

    @property
    def matrices(self) -> tuple[str, ...]:
        """Every matrix, such as "0 attention.query": its layer, then its name there."""
        return tuple(dict.fromkeys(f"{cast.layer} {cast.matrix}" for cast in self.casts))

    def of(
        self, *, step: int | None = None, layer: int | None = None, matrix: str | None = None, role: str | None = None
    ) -> tuple[Fp8Cast, ...]:
        """The casts of a step, layer, matrix or role; what is left out is any."""
        wanted = {"step": step, "layer": layer, "matrix": matrix, "role": role}
        asked = [(name, value) for name, value in wanted.items() if value is not None]
        return tuple(cast for cast in self.casts if all(getattr(cast, name) == value for name, value in asked))

    def __repr__(self) -> str:
        return f"<Fp8Record {self.recipe}: {len(self.steps)} steps, {len(self.matrices)} matrices>"

    @classmethod
    def read(cls, recipe: Fp8, steps: Iterable[tuple[int, Sequence[Sequence[Any]]]]) -> "Fp8Record":
        """Make a record of what ranks report: `(step, [[name, role, amax, scale, underflow, saturation, error], ...])`.

        >>> row = ["layers.1.attention.query", "input", 2.0, 224.0, 0.25, 0.0, None]
        >>> Fp8Record.read(Fp8(), [(0, [row])]).casts[0].matrix
        'attention.query'
        """
        return cls(recipe=recipe, casts=tuple(_cast(step, row) for step, rows in steps for row in rows))


def _cast(step: int, row: Sequence[Any]) -> Fp8Cast:
    _, layer, matrix = row[0].split(".", 2)
    amax, scale, underflow, saturation, error = (math.nan if value is None else float(value) for value in row[2:7])
    return Fp8Cast(
        step=step,
        layer=int(layer),
        matrix=matrix,
        role=ROLES[ROLES.index(row[1])],
        amax=amax,
        scale=scale,
        underflow=underflow,
        saturation=saturation,
        error=error,
    )
