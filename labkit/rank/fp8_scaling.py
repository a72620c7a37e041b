"""The scales of a model's FP8 tensors: where each cast finds its own, and what they become after a step.

Every rank keeps the amaxes, histories and scales of the whole model, also of layers and shards that others hold, and
after a step each amax is the largest of all ranks. So scales are those of one rank that holds the model and sees all
samples, and they do not depend on the layout.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.errors import LabError, PlanError
from labkit.rank import fp8_casting
from labkit.rank.fp8_casting import Cast
from labkit.rank.fp8_library import Library
from labkit.rank.fp8_tally import Tally
from labkit.rank.recorder import Recorder, num_bytes
from labkit.spec import Fp8
from labkit.spec.fp8 import ROLES


class Scaling:
    """Amax, history and scale of each FP8 tensor: an input, a weight or a gradient of one matrix.

    Delayed scaling takes the scales of a whole step from the steps before, and updates them when the step is over:
    Transformer Engine does so at the end of each outermost `te.autocast`, which is here the whole step with all its
    micro-batches. They start at 1.

    Args:
        recipe: how to scale.
        names: the matrices, such as "layers.0.attention.query".
        device: where they live.
        recorder: gets the all-reduce.
        members: the ranks whose amaxes count together; None where one holds all.

    Attributes:
        recipe: how to scale.
        names: the matrices; matrix i has columns 3i (input), 3i + 1 (weight) and 3i + 2 (gradient).
        shapes: this rank's matrices, and how many features go in and come out of each.
        scale: [tensor], those of the step under way (delayed scaling).
        amax: [tensor], the largest magnitudes that the step under way has seen on this rank.
        history: [step, tensor], row 0 for the step under way.
        tally: takes down what casts do; None where nothing is recorded.
        library: what multiplies; None for torch.
        why_torch: why that is torch.
    """

    def __init__(
        self,
        recipe: Fp8,
        names: Sequence[str],
        device: torch.device,
        *,
        recorder: Recorder | None = None,
        members: dist.ProcessGroup | None = None,
    ) -> None:
        self.names, self._device = tuple(names), device
        self.shapes: dict[str, tuple[int, int]] = {}
        self.become(recipe)
        self._recorder, self._members = recorder, members
        self.tally: Tally | None = None

    def become(self, recipe: Fp8) -> None:
        """Begin anew with another recipe."""
        self.recipe = recipe
        self.library: Library | None = None
        self.why_torch = ""
        num_tensors, depth = len(ROLES) * len(self.names), recipe.history if recipe.recipe == "delayed" else 1
        self.scale = torch.ones(num_tensors, device=self._device)
        self.amax = torch.zeros(num_tensors, device=self._device)
        self.history = torch.zeros(depth, num_tensors, device=self._device)
        largest = [recipe.largest(role) for role in ROLES] * len(self.names)
        self._largest = torch.tensor(largest, device=self._device)

    @property
    def is_fresh(self) -> bool:
        """Whether no step has left anything here; with recipes that look at nothing but the tensor, always."""
        return not self.history.any()

    def of(self, name: str) -> "Casts":
        """The casts of one matrix."""
        return Casts(self, name)

    def end_step(self) -> None:
        """Agree on the step's amaxes and take the next step's scales from them; only delayed scaling has any.

        Runs on: all member ranks at once. Communicates: one all-reduce of one number per tensor.

        Raises:
            LabError: a tensor held an infinity, on every rank alike.
        """
        if self.recipe.recipe != "delayed":
            return
        self._agree()
        self._check_finite()
        self.history[0] = self.amax
        amax = fp8_casting.chosen_amax(self.history, self.recipe.amax)
        self.scale = fp8_casting.delayed_scale(amax, self._largest, margin=self.recipe.margin, previous=self.scale)
        self.history = fp8_casting.rolled(self.history)
        self.amax.zero_()

    def _check_finite(self) -> None:
        """Raise LabError where a tensor held an infinity: its cast saturates, so neither loss nor norm shows it."""
        bad = [column for column, amax in enumerate(self.amax.tolist()) if not math.isfinite(amax)]
        if bad:
            matrix, role = divmod(bad[0], len(ROLES))
            others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise LabError(
                f"the largest magnitude of the {ROLES[role]} of {self.names[matrix]}{others} is {self.amax[bad[0]]:g}: "
                "FP8 would go on with its largest number in silence. Train afresh, with a lower learning_rate if the "
                "weights grew by themselves."
            )

    def _agree(self) -> None:
        if self._members is None:
            return
        start = self._recorder.mark() if self._recorder is not None else None
        dist.all_reduce(self.amax, op=dist.ReduceOp.MAX, group=self._members)
        if self._recorder is not None:
            self._recorder.add("all_reduce", start, group="world", num_bytes=num_bytes(self.amax))

    def state(self) -> dict[str, Tensor]:
        """What a later step needs: equal on every rank, and fit for any layout of the model."""
        return {"scale": self.scale.clone(), "history": self.history.clone()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave.

        Raises:
            PlanError: it is another model's, or its history has another length.
        """
        for name in ("scale", "history"):
            own: Tensor = getattr(self, name)
            if state[name].shape != own.shape:
                raise PlanError(
                    f"the FP8 {name} has shape {tuple(state[name].shape)}, not {tuple(own.shape)}: it is of another "
                    "model or recipe. Start fresh."
                )
            own.copy_(state[name])


class Casts:
    """The casts of one matrix's input, weight and gradient.

    Each gives a matrix for products that sum over its columns, and one for those that sum over its rows. With one
    scale they hold the same FP8 values; with blocks they are cast apart, each along what it sums over, but for weights.

    Args:
        scaling: whose scales.
        name: the matrix.
    """

    def __init__(self, scaling: Scaling, name: str) -> None:
        self.scaling, self.name = scaling, name
        first = len(ROLES) * scaling.names.index(name)
        self._column = {role: first + offset for offset, role in enumerate(ROLES)}

    @property
    def has_blocks(self) -> bool:
        """Whether a tensor has many scales."""
        return self.scaling.recipe.recipe == "block"

    def along(self, role: str, x_MK: Tensor) -> Cast:
        """Cast for products that sum over the columns; the first look at a tensor, which counts in its amax."""
        name, column, tally = self.scaling.recipe.format_of(role), self._column[role], self.scaling.tally
        if self.has_blocks:
            found = self._squares(x_MK)[0] if role == "weight" else fp8_casting.cast_rows(x_MK, name)
        else:
            if self.scaling.recipe.recipe == "delayed":
                seen = self.scaling.amax[column]
                torch.maximum(seen, x_MK.abs().amax().float(), out=seen)
            found = fp8_casting.cast(x_MK, name, self._scale(role, x_MK))
        if tally is not None and tally.is_on:
            tally.tensor(column, name, x_MK, found)
        return found

    def across(self, role: str, x_MK: Tensor, along: Cast | None = None) -> Cast:
        """The transpose, cast for products that sum over the rows; `along`: what `along` gave, to be used again."""
        name = self.scaling.recipe.format_of(role)
        if self.has_blocks:
            return self._squares(x_MK)[1] if role == "weight" else fp8_casting.cast_rows(x_MK.t(), name)
        return (along or fp8_casting.cast(x_MK, name, self._scale(role, x_MK))).transposed()

    def compare(self, role: str, product: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
        """Take down a product's error, where that is asked for, under the tensor that the rows of `Tally.take` name."""
        tally = self.scaling.tally
        if tally is not None and tally.is_on:
            tally.product(self._column[role], product, left_MK, right_KN)

    def _scale(self, role: str, x_MK: Tensor) -> Tensor:
        if self.scaling.recipe.recipe == "delayed":
            return self.scaling.scale[self._column[role]]
        return fp8_casting.current_scale(x_MK.abs().amax().float(), self.scaling.recipe.largest(role))

    def _squares(self, w_NK: Tensor) -> tuple[Cast, Cast]:
        return fp8_casting.cast_squares(w_NK, self.scaling.recipe.format_of("weight"))
