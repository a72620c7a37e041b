"""Lays the live training state out anew, in the same processes: the ranks' part of `launch.switch`.

Every rank computes the same list of moves (`labkit.plan.moves`) and knows from it what to send, what to expect and what
it has already. The new state is built beside the old one, which stays whole until every rank has all of its parts.
"""

import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.errors import PlanError
from labkit.plan import Moves, Plan
from labkit.plan.moves import WEIGHT
from labkit.plan.shards import Box, Shard, of_rank, parameters
from labkit.rank import deepspeed_engine, fp8, groups, mesh, state, training
from labkit.rank.contents import Contents, Nothing, TorchContents
from labkit.rank.deepspeed_contents import DeepSpeedContents
from labkit.rank.state import State
from labkit.spec import Training

BATCH_BYTES = 8 << 20
"""What one exchange moves of the whole model, or one parameter if that is larger. A rank's buffer for receiving is at
most as large, its buffer for sending so much for every rank that takes from it."""


def describe() -> dict[str, Any]:
    """Say what this rank's live state is, for checks before anything moves.

    Returns:
        "plan", "optimizer" and "step"; or "why_none".
    """
    try:
        live = state.current()
    except PlanError as error:
        return {"why_none": str(error)}
    return {"plan": live.plan, "optimizer": live.optimizer_kind, "step": live.step}


def switch(moves: Moves, step: int) -> dict[str, float]:
    """Move the live state from one plan to another; the next `training.train` with `start='live'` goes on under it.

    Runs on: every rank of the world at once, also those that have no part before or after. Communicates: exchanges
    between all ranks, batch by batch, and one all-reduce, after which the new state is the live one everywhere.

    Args:
        moves: from which plan to which, and under which optimizer.
        step: the steps that the state has done.

    Returns:
        "build_s" and "move_s": seconds for the new groups and modules, and for the exchange.

    Raises:
        PlanError: this rank's live state is not what `moves` begins with. The state is then what it was.
    """
    start_s = time.monotonic()
    old, new = _old(moves), None
    try:
        new = _new(moves, step)
        built_s = time.monotonic()
        _move(moves, old, new)
    except BaseException:
        _go_back(old, new)
        raise
    state.end("the plan that was switched to does without this rank")
    if new is not None:
        state.keep(new)
    moved_s = time.monotonic()
    del old
    gc.collect()  # wrapped modules are cyclic
    return {"build_s": built_s - start_s, "move_s": moved_s - built_s}


def contents_of(live: State, *, fresh: bool = False) -> Contents:
    """Return what a state holds on this rank; a `fresh` one has never taken a step."""
    if live.plan.engine == "deepspeed":
        return DeepSpeedContents(live, fresh=fresh)
    return TorchContents(live, fresh=fresh)


def _old(moves: Moves) -> State | None:
    if dist.get_rank() >= moves.before.world_size:
        return None
    live = state.current()
    if (live.plan, live.optimizer_kind) != (moves.before, moves.optimizer):
        raise PlanError(
            f"rank {dist.get_rank()} has a live state under '{live.plan.layout}', not '{moves.before.layout}': "
            "a switch begins with one state on all ranks. Train with start='fresh'."
        )
    return live


def _new(moves: Moves, step: int) -> State | None:
    own = mesh.of(moves.after)
    if own is None:
        return None
    settings = Training(num_steps=1, optimizer=moves.optimizer)  # the next run brings its own
    new = training.build(moves.after, settings, own, initialised=False)
    new.step = step
    return new


@torch.no_grad()
def _move(moves: Moves, old: State | None, new: State | None) -> None:
    before, after = _Side(moves.before, old), _Side(moves.after, new, fresh=True)
    for batch in moves.batches(BATCH_BYTES):
        _exchange(moves, batch, before, after)
    _share_num_updates(moves, before, after)
    fp8.carry(
        None if old is None else old.scaling,
        None if new is None else new.scaling,
        precisions=(moves.before.layout.precision, moves.after.layout.precision),
    )


def _go_back(old: State | None, new: State | None) -> None:
    """Leave the old state as it was; DeepSpeed, which knows one world at a time, may have entered another."""
    if new is not None:
        new.update.close()
    if old is not None and old.plan.engine == "deepspeed" and groups.intact():
        deepspeed_engine.enter_world(old.weights.mesh, old.recorder)


class _Part:
    """A flat part of a parameter and the boxes that it is made of, one after the other."""

    def __init__(self, whole: Tensor, boxes: tuple[Box, ...]) -> None:
        self.whole, self._boxes = whole, boxes
        self._pieces = whole.split([box.num_elements for box in boxes]) if boxes else ()

    def view(self, index: int, box: Box) -> Tensor:
        """The elements of a box that lies within box `index`."""
        outer = self._boxes[index]
        rows = self._pieces[index].view(outer.bottom - outer.top, outer.right - outer.left)
        return rows[box.top - outer.top : box.bottom - outer.top, box.left - outer.left : box.right - outer.left]


class _Side:
    """What this rank holds under one of the two plans."""

    def __init__(self, plan: Plan, live: State | None, *, fresh: bool = False) -> None:
        self.contents: Contents = Nothing() if live is None else contents_of(live, fresh=fresh)
        self.shards: dict[str, list[Shard]] = {}
        for shard in of_rank(plan, dist.get_rank()) if dist.get_rank() < plan.world_size else ():
            self.shards.setdefault(shard.name, []).append(shard)

    def parts(self, name: str, quantity: str, *, to_fill: bool = False) -> dict[str, _Part]:
        """This rank's parts of a parameter, by what the rank calls it."""
        take = self.contents.room if to_fill else self.contents.read
        return {
            shard.key: _Part(take(shard.key, quantity), shard.weights if quantity == WEIGHT else shard.states)
            for shard in self.shards.get(name, ())
        }


def _exchange(moves: Moves, batch: list[tuple[str, str]], before: _Side, after: _Side) -> None:
    """Bring a batch of parameters and quantities to where they belong. Communicates: one all-to-all, if any rank sends.

    Both ends of a message pack and unpack in the order of the moves.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sent: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    expected: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    filled = []
    is_silent = True
    for name, quantity in batch:
        held = before.parts(name, quantity)
        wanted = after.parts(name, quantity, to_fill=True)
        filled += [(key, quantity, part.whole) for key, part in wanted.items()]
        for move in moves.of(name, quantity):
            is_silent = is_silent and move.source == move.target
            if move.source == rank:
                sent[move.target].append(held[move.source_key].view(move.source_box, move.box))
            if move.target == rank:
                expected[move.source].append(wanted[move.target_key].view(move.target_box, move.box))
    own, there = sent[rank], expected[rank]
    sent[rank], expected[rank] = [], []
    if own:
        torch._foreach_copy_(there, own)
    if not is_silent:
        _all_to_all(sent, expected)
    for key, quantity, part in filled:
        after.contents.filled(key, quantity, part)


def _all_to_all(sent: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    """Send views to every rank, and fill views with what comes from every rank."""
    sizes, sizes_expected = ([sum(view.numel() for view in views) for views in mail] for mail in (sent, expected))
    device = groups.device()
    packed = torch.empty(sum(sizes), device=device)
    arrived = torch.empty(sum(sizes_expected), device=device)
    _copy(_pieces(packed, sent), [view for views in sent for view in views])
    dist.all_to_all_single(arrived, packed, sizes_expected, sizes)
    _copy([view for views in expected for view in views], _pieces(arrived, expected))


def _pieces(packed: Tensor, mail: list[list[Tensor]]) -> list[Tensor]:
    """A buffer as tensors of the shapes that are packed in it."""
    views = [view for each in mail for view in each]
    flat = packed.split([view.numel() for view in views]) if views else ()
    return [piece.view(view.shape) for piece, view in zip(flat, views, strict=True)]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _share_num_updates(moves: Moves, before: _Side, after: _Side) -> None:
    """Tell every rank how often each parameter was updated. Communicates: one all-reduce, the last of the switch."""
    names = [parameter.name for parameter in parameters(moves.after)]
    known = before.contents.num_updates()
    own = {shard.name: known[shard.key] for shards in before.shards.values() for shard in shards if shard.key in known}
    counts = torch.tensor([own.get(name, 0.0) for name in names], device=groups.device(), dtype=torch.float64)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    by_name = dict(zip(names, counts.tolist(), strict=True))
    after.contents.set_num_updates({shard.key: by_name[name] for name in names for shard in after.shards.get(name, ())})
