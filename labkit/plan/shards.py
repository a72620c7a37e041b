"""Which part of every parameter, and of its optimizer states, a rank holds under a plan."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from labkit.plan.holding import flat_size, part_of
from labkit.plan.parameters import HEAD, Parameter, canonical, of_stage
from labkit.plan.plan import Plan
from labkit.spec import Layout

__all__ = ["Box", "Shard", "of_rank", "parameters"]


class Box(NamedTuple):
    """Neighbouring rows and columns of a matrix: from `top` and `left` up to, and without, `bottom` and `right`."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def num_elements(self) -> int:
        """How many elements it has.

        >>> Box(0, 2, 1, 4).num_elements
        6
        """
        return (self.bottom - self.top) * (self.right - self.left)

    def cut(self, other: "Box") -> "Box | None":
        """What both have, or None.

        >>> Box(0, 4, 0, 4).cut(Box(2, 6, 1, 3))
        Box(top=2, bottom=4, left=1, right=3)
        """
        both = Box(
            max(self.top, other.top),
            min(self.bottom, other.bottom),
            max(self.left, other.left),
            min(self.right, other.right),
        )
        return both if both.top < both.bottom and both.left < both.right else None

    def without(self, part: "Box") -> "list[Box]":
        """The rest, where `part` lies within.

        >>> Box(0, 4, 0, 4).without(Box(1, 4, 0, 2))
        [Box(top=0, bottom=1, left=0, right=4), Box(top=1, bottom=4, left=2, right=4)]
        """
        around = (
            Box(self.top, part.top, self.left, self.right),
            Box(part.bottom, self.bottom, self.left, self.right),
            Box(part.top, part.bottom, self.left, part.left),
            Box(part.top, part.bottom, part.right, self.right),
        )
        return [box for box in around if box.num_elements]


class Shard(NamedTuple):
    """A rank's part of one parameter.

    Attributes:
        key: what the rank calls it: `name`, or the head's own name on a rank that holds a tied matrix twice.
        name: the parameter's name in the whole model.
        weights: where the rank's weights stand in the whole; they are one tensor there, row by row.
        states: where the elements stand whose optimizer states the rank holds, in the order of its memory: up to three
            boxes, because ZeRO-1 cuts by elements.
    """

    key: str
    name: str
    weights: tuple[Box, ...]
    states: tuple[Box, ...]


def of_rank(plan: Plan, rank: int) -> list[Shard]:
    """Return a rank's part of everything it holds, in the order of its modules.

    >>> from labkit.spec import Layout, Model
    >>> plan = Plan(model=Model.preset("tiny"), layout=Layout.parse("dp2 tp2 zero3"))
    >>> [one.weights for one in of_rank(plan, 3) if one.name == "embedding.weight"]
    [(Box(top=192, bottom=256, left=0, right=128),)]
    """
    place = plan.placement(rank)
    found: list[Shard] = []
    own = [one for stage in plan.stages(rank) for one in of_stage(plan, stage)]
    offset, total = 0, sum(parameter.num_elements for parameter in own)
    for parameter in own:
        name = canonical(parameter.name, plan.model)
        is_second = parameter.name == HEAD and any(one.name == name for one in found)
        if plan.engine == "deepspeed":
            weights, states = _on_deepspeed(parameter, plan.layout, place.dp_rank, offset, total)
            offset += parameter.num_elements
        else:
            shape = (parameter.rows, parameter.columns, parameter.split)
            weights, states = _boxes(*shape, plan.layout, place.dp_rank, place.tp_rank)
        found.append(Shard(HEAD if is_second else name, name, weights, states))
    return found


def parameters(plan: Plan) -> list[Parameter]:
    """Return every parameter of the whole model once, in its order."""
    found: dict[str, Parameter] = {}
    for stage in range(plan.num_stages):
        for one in of_stage(plan, stage):
            name = canonical(one.name, plan.model)
            found.setdefault(name, one._replace(name=name))
    return list(found.values())


@lru_cache(maxsize=4096)
def _boxes(
    rows: int, columns: int, split: str, layout: Layout, dp_rank: int, tp_rank: int
) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
    """Weights and optimizer states at a place: first tp splits, then dp."""
    if split == "rows":
        box = Box(tp_rank * rows // layout.tp, (tp_rank + 1) * rows // layout.tp, 0, columns)
    elif split == "columns":
        box = Box(0, rows, tp_rank * columns // layout.tp, (tp_rank + 1) * columns // layout.tp)
    else:
        box = Box(0, rows, 0, columns)
    if layout.zero_stage >= 2:
        num_shards = layout.dp // layout.hybrid
        first, last = part_of(box.bottom - box.top, num_shards, dp_rank % num_shards)
        box = box._replace(top=box.top + first, bottom=box.top + last)
    whole = (box,) if box.num_elements else ()
    if layout.zero_stage == 1 and layout.dp > 1:
        return whole, tuple(_run(box, *part_of(box.num_elements, layout.dp, dp_rank)))
    return whole, whole


def _on_deepspeed(
    parameter: Parameter, layout: Layout, dp_rank: int, offset: int, total: int
) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
    """Weights and optimizer states under DeepSpeed 0.19.8, which only splits over dp.

    Stages 1 and 2 put all parameters one behind the other, fill up to a multiple of 2 dp, and cut that into equal
    parts; stage 3 cuts each parameter by itself.
    """
    box, size = Box(0, parameter.rows, 0, parameter.columns), parameter.num_elements
    if layout.zero_stage == 0:
        return (box,), (box,)
    if layout.zero_stage == 3:
        part = tuple(_run(box, *part_of(size, layout.dp, dp_rank)))
        return part, part
    each = flat_size(total, layout.dp)
    first, last = (min(max(edge * each - offset, 0), size) for edge in (dp_rank, dp_rank + 1))
    return (box,), tuple(_run(box, first, last))


def _run(box: Box, first: int, last: int) -> Iterator[Box]:
    """The elements `first` to `last` of a box, counted row by row, as boxes.

    >>> [tuple(box) for box in _run(Box(0, 3, 0, 4), 2, 9)]
    [(0, 1, 2, 4), (1, 2, 0, 4), (2, 3, 0, 1)]
    """
    width = box.right - box.left
    while first < last:
        row, column = divmod(first, width)
        if column or last - first < width:
            num_rows, end = 1, min(width, column + last - first)
        else:
            num_rows, end = (last - first) // width, width
        top = box.top + row
        yield Box(top, top + num_rows, box.left + column, box.left + end)
        first += num_rows * (end - column)
