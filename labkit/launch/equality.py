"""What a comparison of layouts found: how far each is from one rank, and whether that is rounding."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labkit.plan.text import html_table, text_table
from labkit.spec import Layout, Model

__all__ = ["BANDS", "QUANTITIES", "Bands", "Comparison", "Parity", "Reference", "judge"]

QUANTITIES = ("losses", "grad_norms", "weights")
VERDICTS = ("equal", "within rounding", "different", "failed", "not run")

_COLUMNS = ("layout", "optimizer", "verdict", *QUANTITIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """The largest differences that rounding makes over a few steps.

    Attributes:
        losses: of a step's loss, relative.
        grad_norms: of a step's global gradient norm, relative.
        weights: of any weight, in learning rates.
    """

    losses: float
    grad_norms: float
    weights: float


BANDS = {
    ("fp32", "adamw"): Bands(losses=1e-5, grad_norms=1e-4, weights=0.1),
    ("fp32", "sgd"): Bands(losses=1e-5, grad_norms=1e-4, weights=1e-3),
    ("bf16", "adamw"): Bands(losses=2e-3, grad_norms=5e-3, weights=10.0),
    ("bf16", "sgd"): Bands(losses=2e-3, grad_norms=5e-3, weights=0.02),
    ("fp8", "adamw"): Bands(losses=2e-3, grad_norms=0.02, weights=10.0),
    ("fp8", "sgd"): Bands(losses=2e-3, grad_norms=0.02, weights=0.05),
}
"""By precision and optimizer, for about 5 steps.

Adding up in another order moves the last bit: the 24th of a number in fp32, the 8th in bf16. AdamW moves a weight by up
to a learning rate a step even where its gradient is nothing but rounding, so in bf16 two runs part by up to twice that:
there the weights under SGD tell more. The largest differences seen in a model of 123,424 parameters, of losses,
gradient norms, weights under AdamW and weights under SGD:

- fp32, `benchmarks.parity` on 2 to 4 ranks (446 layouts on torch, 51 on DeepSpeed): 1.9e-7, 4.0e-7, 8.3e-3, 1.2e-6;
- bf16, 52 of them, a ninth: 5.0e-4, 1.2e-3, 3.6, 3.7e-3;
- fp8, six layouts: a fifth to a seventh of its bands.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What one rank gave.

    Attributes:
        layout: dp1 with the whole global batch in one micro-batch.
        optimizer: "adamw" or "sgd".
        learning_rate: of every step.
        clip_norm: the norm that gradients were clipped to.
        losses: by step.
        grad_norms: by step, before clipping.
    """

    layout: Layout
    optimizer: str
    learning_rate: float
    clip_norm: float
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]

    @property
    def num_clipped(self) -> int:
        """In how many steps clipping was active."""
        return sum(norm > self.clip_norm for norm in self.grad_norms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One layout under one optimizer, compared with one rank.

    Attributes:
        layout: the layout.
        optimizer: "adamw" or "sgd".
        verdict: "equal" (to the bit), "within rounding", "different", "failed" or "not run".
        verdicts: the verdict of each quantity ("losses", "grad_norms", "weights").
        differences: the largest difference of each, over steps and ranks: relative, that of weights in learning rates.
        losses: by step.
        grad_norms: by step, before clipping.
        weights: by parameter, the largest difference of the final weights on any rank, in learning rates.
        step: the first step where something is outside its band; None where nothing is.
        parameter: the parameter whose weights differ most after that step.
        why: why it failed or was not run.
    """

    layout: Layout
    optimizer: str
    verdict: str
    verdicts: Mapping[str, str]
    differences: Mapping[str, float]
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    weights: Mapping[str, float]
    step: int | None = None
    parameter: str | None = None
    why: str = ""

    @property
    def bands(self) -> Bands:
        """What rounding may make."""
        return BANDS[self.layout.precision, self.optimizer]

    @property
    def is_good(self) -> bool:
        """Whether the layout trains as one rank does."""
        return self.verdict in VERDICTS[:2]

    def __str__(self) -> str:
        name = f"'{self.layout}' under {self.optimizer}: {self.verdict}"
        if self.verdict == "different":
            outside = [
                f"{quantity} by {self.differences[quantity]:.1e} (band {getattr(self.bands, quantity):g})"
                for quantity in QUANTITIES
                if self.verdicts[quantity] == "different"
            ]
            return f"{name} from step {self.step} on, {', '.join(outside)}; most in {self.parameter}."
        return f"{name}. {self.why}" if self.why else f"{name}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Layouts against one rank: one comparison per layout and optimizer.

    Attributes:
        model: what was trained.
        num_steps: how many steps.
        seed: of weights and samples.
        references: what one rank gave, per precision and optimizer.
        entries: the comparisons, by layout, then optimizer.
    """

    model: Model
    num_steps: int
    seed: int
    references: tuple[Reference, ...]
    entries: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        """Whether every layout trains as one rank does."""
        return all(entry.is_good for entry in self.entries)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts, as given."""
        return tuple(dict.fromkeys(entry.layout for entry in self.entries))

    def entry(self, layout: Layout | str, optimizer: str) -> Comparison:
        """The comparison of a layout (or its text) under an optimizer.

        Raises:
            KeyError: it was not compared.
        """
        wanted = Layout.parse(layout) if isinstance(layout, str) else layout
        for entry in self.entries:
            if (entry.layout, entry.optimizer) == (wanted, optimizer):
                return entry
        raise KeyError((str(wanted), optimizer))

    def headline(self) -> str:
        """What was compared with what, and how it came out, in one line."""
        counts = {verdict: sum(entry.verdict == verdict for entry in self.entries) for verdict in VERDICTS}
        found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        against = " and ".join(dict.fromkeys(f"'{one.layout}'" for one in self.references))
        optimizers = " and ".join(dict.fromkeys(entry.optimizer for entry in self.entries))
        what = f"{_counted(len(self.layouts), 'layout')} under {optimizers} against one rank ({against})"
        return f"{what} over {_counted(self.num_steps, 'step')}, seed {self.seed}: {found}"

    def clipping(self) -> list[str]:
        """Where clipping was active, a sentence per reference."""
        return [
            f"{one.optimizer} in {one.layout.precision}: gradients clipped to norm {one.clip_norm:.3g} in "
            f"{one.num_clipped} of {len(one.grad_norms)} steps (smallest norm {min(one.grad_norms):.3g})."
            for one in self.references
        ]

    def __str__(self) -> str:
        lines = [text_table(self.headline(), _COLUMNS, self._rows()), *self._remarks()]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        remarks = "".join(f"<li>{html.escape(one)}</li>" for one in self._remarks())
        return f"{html_table(self.headline(), _COLUMNS, self._rows())}<ul>{remarks}</ul>"

    def _rows(self) -> list[list[str]]:
        return [
            [str(one.layout), one.optimizer, one.verdict, *(difference_text(one, name) for name in QUANTITIES)]
            for one in self.entries
        ]

    def _remarks(self) -> list[str]:
        bad = [str(one) for one in self.entries if not one.is_good]
        units = "Differences are relative, those of weights in learning rates; '=' is equal to the last bit."
        return [*bad, *self.clipping(), units]


def difference_text(entry: Comparison, quantity: str) -> str:
    """The largest difference of a quantity as it stands in a table."""
    if quantity not in entry.differences:
        return "-"
    found = entry.differences[quantity]
    return "=" if found == 0 else f"{found:.1e}"


def judge(
    layout: Layout,
    reference: Reference,
    *,
    losses: Sequence[float],
    grad_norms: Sequence[float],
    weights: Mapping[int, Mapping[str, float]],
) -> Comparison:
    """Compare what a layout gave with what one rank gave.

    Args:
        layout: the layout.
        reference: what one rank gave.
        losses: the layout's, by step.
        grad_norms: the layout's, by step.
        weights: after the steps that were looked at, by parameter, the largest difference of an element. The last step
            is one of them.
    """
    by_step = {
        "losses": _relative(losses, reference.losses),
        "grad_norms": _relative(grad_norms, reference.grad_norms),
        "weights": {step: max(found.values()) / reference.learning_rate for step, found in weights.items()},
    }
    bands = BANDS[layout.precision, reference.optimizer]
    largest = {name: max(values.values()) for name, values in by_step.items()}
    verdicts = {name: _verdict(value, getattr(bands, name)) for name, value in largest.items()}
    outside = [
        next(step for step, value in by_step[name].items() if value > getattr(bands, name))
        for name, verdict in verdicts.items()
        if verdict == "different"
    ]
    step = min(outside, default=None)
    final = weights[max(weights)]
    return Comparison(
        layout=layout,
        optimizer=reference.optimizer,
        verdict=max(verdicts.values(), key=VERDICTS.index),
        verdicts=verdicts,
        differences=largest,
        losses=tuple(losses),
        grad_norms=tuple(grad_norms),
        weights={name: value / reference.learning_rate for name, value in final.items()},
        step=step,
        parameter=None if step is None else _largest(weights.get(step, final)),
    )


def _largest(values: Mapping[str, float]) -> str:
    return max(values, key=values.__getitem__)


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


def _relative(values: Sequence[float], wanted: Sequence[float]) -> dict[int, float]:
    """The relative difference of each step; infinite where one is no number."""
    pairs = enumerate(zip(values, wanted, strict=True))
    found = {step: abs(one - other) / (abs(other) or 1.0) for step, (one, other) in pairs}
    return {step: math.inf if math.isnan(value) else value for step, value in found.items()}


def _verdict(difference: float, band: float) -> str:
    if difference == 0:
        return "equal"
    return "different" if difference > band else "within rounding"
