"""What casts to FP8 do to the numbers of a step: magnitudes, scales, losses to zero and to the top, and errors."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.rank import fp8_casting
from labkit.rank.fp8_casting import Cast
from labkit.rank.recorder import Recorder, num_bytes
from labkit.spec.fp8 import ROLES

_COUNTS = ("values", "flushed", "saturated", "error", "size")


class Tally:
    """Counts the casts and products of a step's last micro-batch, on all ranks together.

    Args:
        names: the matrices, three tensors each.
        device: where the counts live.
        recorder: knows the micro-batch under way, and gets the all-reduces.
        microbatch: the one that counts.
    """

    def __init__(self, names: tuple[str, ...], device: torch.device, recorder: Recorder, microbatch: int) -> None:
        self._names, self._recorder, self._microbatch = names, recorder, microbatch
        num_tensors = len(ROLES) * len(names)
        self._sums = torch.zeros(num_tensors, len(_COUNTS), dtype=torch.float64, device=device)
        self._tops = torch.full((num_tensors, 2), -torch.inf, device=device)  # amax, and minus the scale

    @property
    def is_on(self) -> bool:
        """Whether the micro-batch under way counts."""
        return self._recorder.microbatch == self._microbatch

    def tensor(self, column: int, name: str, x_MK: Tensor, cast: Cast) -> None:
        """Take down a cast. What is cast again, by recomputation or by half a backward, counts once."""
        magnitude = x_MK.abs().float()
        flushed = (magnitude > 0) & (cast.values.float() == 0)
        inverse = fp8_casting.entrywise(cast).expand_as(magnitude)
        saturated = magnitude > fp8_casting.SATURATES_ABOVE[name] * inverse
        counts = (float(magnitude.numel()), flushed.sum(), saturated.sum())
        self._sums[column, :3] = torch.stack([torch.as_tensor(count, dtype=torch.float64) for count in counts])
        top = magnitude.argmax()  # a block of nothing but 0 has a scale that says nothing
        amax = magnitude.flatten()[top]
        self._tops[column, 0] = amax
        self._tops[column, 1] = torch.where(amax > 0, -inverse.reshape(-1)[top].reciprocal(), -torch.inf)

    def product(self, column: int, found: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
        """Take down how far a product is from that of the same matrices in bf16."""
        twin = (left_MK.bfloat16() @ right_KN.bfloat16()).float()
        self._sums[column, 3] = (found.float() - twin).double().square().sum()
        self._sums[column, 4] = twin.double().square().sum()

    def take(self, members: dist.ProcessGroup | None) -> list[list[Any]]:
        """Add up what the ranks counted, and begin anew.

        Runs on: all member ranks at once. Communicates: two all-reduces.

        Returns:
            A row for each tensor: matrix, role, amax, scale (with blocks, that of the largest entry), share of values
            that became 0, share that was cut off, and the error of a product: of the output for the input, of the
            input's gradient for the weight, of the weight's gradient for the gradient. What was not counted, or is not
            finite, is None.
        """
        if members is not None:
            for table, operation in ((self._tops, dist.ReduceOp.MAX), (self._sums, dist.ReduceOp.SUM)):
                start = self._recorder.mark()
                dist.all_reduce(table, op=operation, group=members)
                self._recorder.add("all_reduce", start, group="world", num_bytes=num_bytes(table))
        values, flushed, saturated, error, size = self._sums.unbind(dim=1)
        columns = torch.stack(
            [
                self._tops[:, 0].double(),
                -self._tops[:, 1].double(),
                flushed / values,
                saturated / values,
                (error / size).sqrt(),
            ],
            dim=1,
        )
        finite = torch.isfinite(columns)
        rows = [
            [self._names[index // len(ROLES)], ROLES[index % len(ROLES)]]
            + [number if known else None for number, known in zip(numbers, which, strict=True)]
            for index, (numbers, which) in enumerate(zip(columns.tolist(), finite.tolist(), strict=True))
        ]
        self._sums.zero_()
        self._tops.fill_(-torch.inf)
        return rows
