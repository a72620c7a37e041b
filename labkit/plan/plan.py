"""A model laid out over ranks: who holds which layers, which ranks form which group, who does what when."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from labkit.errors import PlanError
from labkit.plan.holding import Holding, held, on_rank
from labkit.plan.parameters import Parameter, of_stage
from labkit.plan.text import html_table, text_table
from labkit.schedule import Action, stages_of
from labkit.schedule import build as build_schedule
from labkit.spec import Layout, Model
from labkit.spec.checks import choice, shown, whole

__all__ = ["AXES", "Placement", "Plan"]

AXES = ("pp", "dp", "tp")
"""Axes of the mesh, outermost first: neighbouring ranks share a tensor-parallel group."""

_COLUMNS = ("rank", "dp", "tp", "pp", "layers", "parameters")
_HELD_COLUMNS = ("weights held", "gradients held", "states held")
_MOST_ROWS = 16


class Placement(NamedTuple):
    """A rank's place on each axis."""

    dp_rank: int
    tp_rank: int
    pp_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A model and a layout that fit; made by `labkit.plan.build`.

    Ranks fill a mesh of shape (pp, dp, tp): rank = (pp_rank * dp + dp_rank) * tp + tp_rank. Layers that do not divide
    evenly go to the earlier stages, one more each, because the last stage also computes the head and the loss.

    Attributes:
        model: what is trained.
        layout: how it is laid out.
        engine: what runs it: "torch" or "deepspeed".
        schedule: the actions of each pp rank, where the layout's schedule is "own"; else None.
    """

    model: Model
    layout: Layout
    engine: str = "torch"
    schedule: tuple[tuple[Action, ...], ...] | None = None

    @property
    def world_size(self) -> int:
        """Ranks that take part.

        >>> _example("dp2 pp2").world_size
        4
        """
        return self.layout.world_size

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline.

        >>> _example("dp2 pp2").num_stages
        2
        """
        return self.layout.num_stages

    @property
    def actions(self) -> list[list[Action]]:
        """The schedule: for each pp rank, its computations in order.

        With one stage there is no pipeline: every micro-batch goes forward and backward before the next (gradient
        accumulation), whatever the layout's schedule. `labkit.schedule.add_communication` adds sends and receives.

        >>> [str(action) for action in _example("pp2 m2 1f1b").actions[0]]
        ['0F0', '0F1', '0B0', '0B1']
        """
        layout = self.layout
        name = layout.schedule if layout.num_stages > 1 else "1f1b"
        lines = self.schedule
        if lines is None:
            lines = _actions(name, layout.pp, layout.num_microbatches, layout.num_virtual_stages)
        return [list(line) for line in lines]

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains on, over all ranks.

        >>> _example("dp2 m4").tokens_per_step  # 8 samples of 128 tokens
        1024
        """
        return self.layout.global_batch_size * self.model.seq_len

    @property
    def flops_per_step(self) -> int:
        """Operations of one step over all ranks (`Model.flops_per_token`), recompute not counted.

        >>> plan = _example("dp2 m4")
        >>> plan.flops_per_step == 1024 * plan.model.flops_per_token
        True
        """
        return self.tokens_per_step * self.model.flops_per_token

    def placement(self, rank: int) -> Placement:
        """Return a rank's place on each axis.

        Raises:
            PlanError: no such rank in this plan.

        >>> _example("dp2 tp2 pp2").placement(5)
        Placement(dp_rank=0, tp_rank=1, pp_rank=1)
        """
        rank = self._rank(rank)
        outer, tp_rank = divmod(rank, self.layout.tp)
        pp_rank, dp_rank = divmod(outer, self.layout.dp)
        return Placement(dp_rank=dp_rank, tp_rank=tp_rank, pp_rank=pp_rank)

    def rank_at(self, *, dp_rank: int = 0, tp_rank: int = 0, pp_rank: int = 0) -> int:
        """Return the rank at a place; the inverse of `placement`.

        Raises:
            PlanError: outside the mesh.

        >>> _example("dp2 tp2 pp2").rank_at(tp_rank=1, pp_rank=1)
        5
        """
        dp_rank = whole("dp_rank", dp_rank, minimum=0, maximum=self.layout.dp - 1)
        tp_rank = whole("tp_rank", tp_rank, minimum=0, maximum=self.layout.tp - 1)
        pp_rank = whole("pp_rank", pp_rank, minimum=0, maximum=self.layout.pp - 1)
        return (pp_rank * self.layout.dp + dp_rank) * self.layout.tp + tp_rank

    def group_ranks(self, axis: str, rank: int) -> list[int]:
        """Return the ranks of `rank`'s group on `axis`, in the axis's order.

        Raises:
            PlanError: no such axis or rank.

        >>> _example("dp2 tp2 pp2").group_ranks("dp", 5)
        [5, 7]
        """
        choice("axis", axis, AXES)
        place = self.placement(rank)._asdict()
        degree: int = getattr(self.layout, axis)
        return [self.rank_at(**(place | {f"{axis}_rank": index})) for index in range(degree)]

    def groups(self, axis: str) -> list[list[int]]:
        """Return every group of `axis`, by first rank.

        Raises:
            PlanError: no such axis.

        >>> _example("dp2 tp2").groups("tp")
        [[0, 1], [2, 3]]
        """
        choice("axis", axis, AXES)
        firsts = (rank for rank in range(self.world_size) if getattr(self.placement(rank), f"{axis}_rank") == 0)
        return [self.group_ranks(axis, rank) for rank in firsts]

    def layers(self, stage: int) -> range:
        """Return the layers of a stage, counted from 0.

        Raises:
            PlanError: no such stage.

        >>> plan = _example("pp3")  # 4 layers
        >>> [len(plan.layers(stage)) for stage in range(3)]
        [2, 1, 1]
        """
        stage = whole("stage", stage, minimum=0, maximum=self.num_stages - 1)
        each, extra = divmod(self.model.num_layers, self.num_stages)
        start = stage * each + min(stage, extra)
        return range(start, start + each + (1 if stage < extra else 0))

    def stages(self, rank: int) -> list[int]:
        """Return the stages that a rank holds, in the model's order.

        Interleaved schedules give pp rank r of p the stages r, r + p, ...; V-shaped ones r and 2p - 1 - r; a schedule
        of one's own those whose actions stand in its line.

        Raises:
            PlanError: no such rank.

        >>> _example("dp2 pp2").stages(3), _example("pp2 interleaved v2").stages(1), _example("pp2 zbv v2").stages(0)
        ([1], [1, 3], [0, 3])
        """
        return self._stages(self.placement(rank).pp_rank)

    def pp_rank_of(self, stage: int) -> int:
        """Return the pp rank that holds a stage.

        Raises:
            PlanError: no such stage.

        >>> [_example("pp2 zbv v2").pp_rank_of(stage) for stage in range(4)]
        [0, 1, 1, 0]
        """
        stage = whole("stage", stage, minimum=0, maximum=self.num_stages - 1)
        return next(pp_rank for pp_rank in range(self.layout.pp) if stage in self._stages(pp_rank))

    def _stages(self, pp_rank: int) -> list[int]:
        if self.schedule is not None:
            return sorted({action.stage for action in self.schedule[pp_rank]})
        layout = self.layout
        return stages_of(layout.schedule, pp_rank, layout.pp, layout.num_virtual_stages)

    @property
    def has_twin(self) -> bool:
        """Whether the first and the last stage each hold a copy of one matrix: tied embeddings in a pipeline.

        >>> _example("pp2").has_twin
        False
        """
        return self.model.tied_embeddings and self.num_stages > 1

    def num_parameters(self, rank: int) -> int:
        """Return the parameters of a rank's stages, its part of each matrix; ZeRO keeps fewer (`holding`).

        Matrices, column biases and vocabulary tables are split over tp; norms, row biases and learned positions are
        not. With tied embeddings and several stages the last stage holds its own copy of the matrix.

        Raises:
            PlanError: no such rank.

        >>> _example("dp1").num_parameters(0) == Model.preset("tiny").num_parameters
        True
        """
        return sum(math.prod(on_rank(one, self.layout.tp)) for one in self._parameters(rank))

    def holding(self, rank: int) -> Holding:
        """Return how much of its parameters, gradients and optimizer states a rank keeps, in elements.

        Raises:
            PlanError: no such rank.

        >>> _example("dp4").holding(0)
        Holding(parameters=803968, gradients=803968, optimizer=803968)
        >>> _example("dp4 zero2").holding(0)
        Holding(parameters=803968, gradients=200992, optimizer=200992)
        >>> _example("dp4 zero3").holding(0)
        Holding(parameters=200992, gradients=200992, optimizer=200992)
        """
        return held(self.layout, self.engine, self._parameters(rank), self.placement(rank).dp_rank)

    def _parameters(self, rank: int) -> list[Parameter]:
        """What its stages hold, whole; a tied matrix counts once in a stage, and twice on a rank with both ends."""
        return [one for stage in self.stages(rank) for one in of_stage(self, stage)]

    def summary(self) -> str:
        """Return a text table of each rank's place, layers and parameters; past 16 ranks, the first 15 and the last.

        Under ZeRO also what of them the rank holds (`holding`).

        >>> for line in _example("dp2").summary().splitlines()[1:]:
        ...     print(line)
        rank  dp  tp  pp  layers  parameters
           0   0   0   0     0-3     803,968
           1   1   0   0     0-3     803,968
        """
        return text_table(str(self), self._columns(), self._rows())

    def __str__(self) -> str:
        return f"{self.layout} on {self.world_size} ranks, engine {self.engine}: {self.model}"

    def _repr_html_(self) -> str:
        return html_table(str(self), self._columns(), self._rows())

    def _rank(self, rank: object) -> int:
        if isinstance(rank, int) and not isinstance(rank, bool) and rank >= self.world_size:
            raise PlanError(
                f"rank={shown(rank)} but layout '{self.layout}' takes {self.world_size} ranks: "
                f"ranks end at {self.world_size - 1}."
            )
        return whole("rank", rank, minimum=0, maximum=self.world_size - 1)

    def _columns(self) -> tuple[str, ...]:
        return _COLUMNS + (_HELD_COLUMNS if self.layout.zero_stage else ())

    def _rows(self) -> list[list[str]]:
        size = self.world_size
        gap = ["…"] * len(self._columns())
        if size <= _MOST_ROWS:
            return [self._row(rank) for rank in range(size)]
        return [*(self._row(rank) for rank in range(_MOST_ROWS - 1)), gap, self._row(size - 1)]

    def _row(self, rank: int) -> list[str]:
        place = self.placement(rank)
        spans = [self.layers(stage) for stage in self.stages(rank)]
        layers = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
        names = (rank, place.dp_rank, place.tp_rank, place.pp_rank, layers)
        counts = (self.num_parameters(rank), *(self.holding(rank) if self.layout.zero_stage else ()))
        return [*(str(name) for name in names), *(f"{count:,}" for count in counts)]


@lru_cache(maxsize=64)
def _actions(
    schedule: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int
) -> tuple[tuple[Action, ...], ...]:
    lines = build_schedule(schedule, num_ranks, num_microbatches, num_virtual_stages)
    return tuple(tuple(line) for line in lines)


def _example(text: str) -> Plan:
    """A plan for the examples above."""
    return Plan(model=Model.preset("tiny"), layout=Layout.parse(text))
