"""What goes from which rank to which when a training state changes its plan: computed, before anything moves."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from labkit.errors import PlanError
from labkit.plan.plan import Plan
from labkit.plan.shards import Box, Shard, of_rank, parameters
from labkit.spec.checks import choice

__all__ = ["STATES", "WEIGHT", "Move", "Moves", "moves"]

WEIGHT = "weight"
STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}
"""What each optimizer keeps for every element, beside the weight."""

BYTES_EACH = 4
"""fp32: weights and optimizer states under every precision."""


class Move(NamedTuple):
    """A box of one parameter that a rank gets from a rank, which may be itself.

    Attributes:
        source: the rank that holds it.
        source_key: what that rank calls the parameter.
        source_box: which of the boxes it holds contains this one.
        target: the rank that gets it.
        target_key: what it calls the parameter.
        target_box: which of its boxes.
        box: where the elements stand in the whole parameter.
    """

    source: int
    source_key: str
    source_box: int
    target: int
    target_key: str
    target_box: int
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """A change of plan, as what it sends; made by `moves`.

    Every element is fetched once by every rank that will hold it: from its own memory where it holds it already, else
    from one of the ranks that do, and replicas share the sending.

    Attributes:
        before: the plan that the state has.
        after: the plan that it gets.
        optimizer: "adamw" or "sgd", which says what states there are.
    """

    before: Plan
    after: Plan
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        choice("optimizer", self.optimizer, tuple(STATES))
        if self.before.model != self.after.model:
            raise PlanError(
                f"the plan is for {self.after.model} and the state of {self.before.model}: a state is laid out anew "
                "for the model that it is of. Build the plan from that model."
            )

    @property
    def num_ranks(self) -> int:
        """Ranks that have a part before or after."""
        return max(self.before.world_size, self.after.world_size)

    @property
    def quantities(self) -> tuple[str, ...]:
        """What is moved of every parameter: the weight, and the optimizer's states."""
        return (WEIGHT, *STATES[self.optimizer])

    @property
    def matrix(self) -> list[list[int]]:
        """`matrix[a][b]`: bytes that rank b takes from rank a; on the diagonal what it has already."""
        found = [[0] * self.num_ranks for _ in range(self.num_ranks)]
        for name in (one.name for one in parameters(self.after)):
            for quantity in self.quantities:
                for move in self.of(name, quantity):
                    found[move.source][move.target] += move.box.num_elements * BYTES_EACH
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes that go from one rank to another."""
        return sum(size for a, row in enumerate(self.matrix) for b, size in enumerate(row) if a != b)

    def of(self, name: str, quantity: str) -> list[Move]:
        """Return the moves of one parameter's weight or state, in the order in which they are packed."""
        is_weight = quantity == WEIGHT
        sources, targets = _holders(self.before)[name], _holders(self.after)[name]
        found = _route(_places(sources, is_weight), _places(targets, is_weight))
        return [
            Move(sources[a][0], sources[a][1].key, a_box, targets[b][0], targets[b][1].key, b_box, box)
            for a, a_box, b, b_box, box in found
        ]

    def batches(self, most_bytes: int) -> Iterator[list[tuple[str, str]]]:
        """Give every parameter and quantity once, in lists that hold at most `most_bytes` whole, or one parameter."""
        batch: list[tuple[str, str]] = []
        size = 0
        for one in parameters(self.after):
            for quantity in self.quantities:
                if batch and size + one.num_elements * BYTES_EACH > most_bytes:
                    yield batch
                    batch, size = [], 0
                batch.append((one.name, quantity))
                size += one.num_elements * BYTES_EACH
        yield batch

    def __str__(self) -> str:
        return f"{self.before.layout} -> {self.after.layout}: {self.num_bytes / 1e6:,.1f} MB between ranks"


def moves(before: Plan, after: Plan, optimizer: str = "adamw") -> Moves:
    """Lay out what a change of plan moves.

    Raises:
        PlanError: not the same model, or no such optimizer.

    >>> from labkit.spec import Layout, Model
    >>> dp, pp = (Plan(model=Model.preset("tiny"), layout=Layout.parse(text)) for text in ("dp2", "pp2"))
    >>> moves(dp, pp).num_bytes  # every rank of dp2 holds all
    0
    >>> print(moves(pp, dp))
    pp2 1f1b m4 -> dp2: 9.6 MB between ranks
    """
    return Moves(before=before, after=after, optimizer=optimizer)


@lru_cache(maxsize=8)
def _holders(plan: Plan) -> dict[str, list[tuple[int, Shard]]]:
    """By name, who holds a part of it."""
    found: dict[str, list[tuple[int, Shard]]] = {}
    for rank in range(plan.world_size):
        for shard in of_rank(plan, rank):
            found.setdefault(shard.name, []).append((rank, shard))
    return found


_Places = tuple[tuple[int, tuple[Box, ...]], ...]


def _places(holders: list[tuple[int, Shard]], is_weight: bool) -> _Places:
    return tuple((rank, shard.weights if is_weight else shard.states) for rank, shard in holders)


@lru_cache(maxsize=4096)
def _route(sources: _Places, targets: _Places) -> tuple[tuple[int, int, int, int, Box], ...]:
    """For every box of the targets, from where its elements come: (source, its box, target, its box, elements)."""
    found = []
    for b, (target, boxes) in enumerate(targets):
        order = _preferred(sources, target)
        for b_box, box in enumerate(boxes):
            missing = [box]
            for a in order:
                for a_box, held in enumerate(sources[a][1]):
                    missing, taken = _take(missing, held)
                    found += [(a, a_box, b, b_box, part) for part in taken]
                if not missing:
                    break
            if missing:
                raise PlanError(f"no rank holds rows {missing[0].top} to {missing[0].bottom} of a parameter.")
    return tuple(found)


def _preferred(sources: _Places, target: int) -> list[int]:
    """Sources in the order in which a rank asks them: itself, then the others, each rank beginning elsewhere."""
    own = [a for a, (rank, _) in enumerate(sources) if rank == target]
    others = [a for a, (rank, _) in enumerate(sources) if rank != target]
    turn = target % max(len(others), 1)
    return own + others[turn:] + others[:turn]


def _take(missing: list[Box], held: Box) -> tuple[list[Box], list[Box]]:
    """What of the missing boxes is still missing when `held` gives what it has, and what it gives."""
    left: list[Box] = []
    taken: list[Box] = []
    for box in missing:
        part = box.cut(held)
        if part is None:
            left.append(box)
        else:
            taken.append(part)
            left += box.without(part)
    return left, taken
