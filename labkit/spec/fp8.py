"""How numbers become FP8: the formats, and what a scale is computed from."""

from dataclasses import dataclass
from typing import cast

from labkit.errors import PlanError
from labkit.spec.checks import choice, shown, whole

__all__ = ["LARGEST", "ROLES", "Fp8"]

RECIPES = ("delayed", "current", "block")
FORMATS = ("hybrid", "e4m3")
CHOSEN = ("max", "most_recent")

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
"""The largest finite number of each format (Micikevicius et al. 2022, arXiv 2209.05433, table 1)."""

ROLES = ("input", "weight", "gradient")
"""What a linear layer casts to FP8: its input, its weight, and the gradient of its output."""

_OF_HISTORY = ("history", "amax", "margin")
_LARGEST_HISTORY = 65_536
_LARGEST_MARGIN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """An FP8 recipe, with the meaning and the defaults of Transformer Engine's (`transformer_engine.common.recipe`).

    A tensor is multiplied by its scale, cut off at the format's largest number and rounded to FP8; its product is
    divided by the scales again. A scale is `largest / amax / 2^margin`, so that the largest magnitude (amax) just fits.

    Attributes:
        recipe: what amax the scale comes from. "delayed": those of the last steps, one scale a tensor (DelayedScaling).
            "current": that of the tensor itself (Float8CurrentScaling). "block": that of each 1 x 128 entries, of each
            128 x 128 in weights, rounded down to a power of two (Float8BlockScaling).
        format: "hybrid" is E4M3 for inputs and weights and E5M2 for gradients, "e4m3" is E4M3 for all; None = the
            recipe's own, "e4m3" for "block" and "hybrid" for the others. A str once the value exists.
        history: delayed: how many steps are looked back on, the present one included.
        amax: delayed: the "max" of the history or its "most_recent" entry.
        margin: delayed: powers of two that are kept free above amax.

    Raises:
        PlanError: a field of the wrong type or out of range, or one of delayed scaling with another recipe.

    >>> Fp8()
    Fp8(recipe='delayed', format='hybrid', history=1024, amax='max', margin=0)
    >>> Fp8().format_of("gradient"), Fp8(recipe="block").format_of("gradient")
    ('e5m2', 'e4m3')
    """

    recipe: str = "delayed"
    format: str = cast(str, None)  # None chooses; a str once the value exists
    history: int = 1024
    amax: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        recipe = choice("Fp8.recipe", self.recipe, RECIPES)
        given: object = self.format
        clean: dict[str, object] = {
            "recipe": recipe,
            "format": choice(
                "Fp8.format", ("e4m3" if recipe == "block" else "hybrid") if given is None else given, FORMATS
            ),
            "history": whole("Fp8.history", self.history, maximum=_LARGEST_HISTORY),
            "amax": choice("Fp8.amax", self.amax, CHOSEN),
            "margin": whole("Fp8.margin", self.margin, minimum=0, maximum=_LARGEST_MARGIN),
        }
        for name, value in clean.items():
            object.__setattr__(self, name, value)
        if recipe != "delayed":
            self._refuse_history()

    def _refuse_history(self) -> None:
        for name in _OF_HISTORY:
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if value != default:
                raise PlanError(
                    f"Fp8.{name}={shown(value)} with recipe={self.recipe!r}: only delayed scaling looks back. "
                    f"Use recipe='delayed' or drop {name}."
                )

    def format_of(self, role: str) -> str:
        """The format of a linear layer's "input", "weight" or "gradient": "e4m3" or "e5m2"."""
        return "e5m2" if self.format == "hybrid" and role == "gradient" else "e4m3"

    def largest(self, role: str) -> float:
        """The largest number of that format.

        >>> Fp8().largest("input"), Fp8().largest("gradient")
        (448.0, 57344.0)
        """
        return LARGEST[self.format_of(role)]
