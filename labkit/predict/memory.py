"""The bytes that every rank of a plan needs in a step, by what they are for, and where the peak is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import overload

from labkit.errors import PlanError
from labkit.plan import Plan
from labkit.plan.moves import BYTES_EACH, STATES
from labkit.predict.buffers import bucket_bytes, in_buckets, position_bytes, sample_bytes, update_bytes
from labkit.predict.in_flight import steps
from labkit.predict.moments import highest
from labkit.predict.sizes import homes, passes_on
from labkit.predict.stage_memory import Costs, costs_of
from labkit.spec.checks import choice, shown

__all__ = ["CATEGORIES", "Memories", "Memory", "memory"]

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "temporary")
"""What memory is for, in the order in which pictures stack it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one rank needs in a step, in bytes.

    Each category is its own highest over the step. They are not highest at one time, so `peak` is at most their sum;
    `at_peak` has what each has then.

    Attributes:
        rank: the rank.
        parameters: weights kept from step to step, and under ZeRO-2 their whole copies.
        gradients: kept until the optimizer's step.
        optimizer: its states; DeepSpeed's own copies of what it updates.
        activations: kept from forwards to backwards, of all micro-batches in flight.
        buffers: for communication: received tensors, gathered weights, packed gradients; the step's samples.
        temporary: what comes and goes within one action: gradients on their way, recomputed layers.
        peak: the most at any time.
        host: what of all this lies in host memory, because the layout offloads it.
        peak_at: the action during which the peak is, such as "0B0"; or "update".
        activations_by_kind: `labkit.predict.activations.KINDS` -> bytes.
        buffers_by_kind: kind -> bytes.
        at_peak: category -> bytes at the peak; they add up to it.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    temporary: int
    peak: int
    host: int
    peak_at: str
    activations_by_kind: Mapping[str, int]
    buffers_by_kind: Mapping[str, int]
    at_peak: Mapping[str, int]

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer states together (`labkit.predict.state_bytes`)."""
        return self.parameters + self.gradients + self.optimizer


class Memories(Sequence[Memory]):
    """The memory of every rank, each computed when it is asked for; ranks of equal parts are computed once.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> found = memory(plan.build(Model.preset("llama3-405b"), Layout.parse("dp128 tp8 pp16 zero1 m16 bf16 sp")))
    >>> len(found), len(found.distinct()), found.largest.rank
    (16384, 16, 0)
    """

    def __init__(self, plan: Plan, optimizer: str) -> None:
        self.plan, self.optimizer = plan, optimizer

    def __len__(self) -> int:
        return self.plan.world_size

    @overload
    def __getitem__(self, index: int) -> Memory: ...

    @overload
    def __getitem__(self, index: slice) -> list[Memory]: ...

    def __getitem__(self, index: int | slice) -> Memory | list[Memory]:
        if isinstance(index, slice):
            return [self[rank] for rank in range(*index.indices(len(self)))]
        size = len(self)
        rank = index + size if index < 0 else index
        if not 0 <= rank < size:
            raise IndexError(f"rank {index} of a plan with {size} ranks: they end at {size - 1}")
        place = self.plan.placement(rank)
        return replace(_of(self.plan, self.optimizer, place.pp_rank, _part(self.plan, place.dp_rank)), rank=rank)

    def __iter__(self) -> Iterator[Memory]:
        return (self[rank] for rank in range(len(self)))

    def distinct(self) -> list[Memory]:
        """The first rank of every pipeline place: it has the largest part of what is sharded over dp."""
        return [self[self.plan.rank_at(pp_rank=pp_rank)] for pp_rank in range(self.plan.layout.pp)]

    @property
    def largest(self) -> Memory:
        """The first of the ranks with the highest peak on the device: the one that a device must hold."""
        return max(self.distinct(), key=lambda one: one.peak - one.host)

    def __repr__(self) -> str:
        most = self.largest
        return (
            f"{len(self)} ranks, at most {most.peak / 2**30:.3g} GiB on rank {most.rank} at {most.peak_at}: {self.plan}"
        )


def memory(plan: Plan, *, optimizer: str = "adamw") -> Memories:
    """Predict the memory of every rank: training state, activations, buffers, and what comes and goes.

    State is counted by `Plan.holding`, fp32 under every precision as in this lab; activations by the formulas of
    `labkit.predict.activations` for the micro-batches in flight, counted from the plan's actions. The peak is the most
    that is there at the beginning of any backward, at its first layer, its last, its end, or at the update.

    Args:
        plan: the plan.
        optimizer: "adamw" (two moments) or "sgd" (none).

    Returns:
        One `Memory` per rank, computed as it is asked for.

    Raises:
        PlanError: no plan, or no such optimizer.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> one = memory(plan.build(Model.preset("tiny"), Layout.parse("dp1 b4")))[0]
    >>> one.states == 16 * Model.preset("tiny").num_parameters
    True
    >>> one.peak_at, one.peak == sum(one.at_peak.values())
    ('0B0', True)
    >>> [one.activations_by_kind[kind] for kind in ("norms", "attention", "feed-forward")]
    [4737024, 5308416, 12582912]
    """
    given: object = plan
    if not isinstance(given, Plan):
        raise PlanError(f"plan {shown(plan)} is no Plan: use labkit.plan.build(model, layout).")
    choice("optimizer", optimizer, tuple(STATES))
    return Memories(plan, optimizer)


def _part(plan: Plan, dp_rank: int) -> int:
    """Which part of what is sharded a dp rank has; 0 where all parts are equal."""
    layout = plan.layout
    return dp_rank % (layout.dp // layout.hybrid) if layout.zero_stage and plan.engine == "torch" else 0


@lru_cache(maxsize=4096)
def _of(plan: Plan, optimizer: str, pp_rank: int, dp_rank: int) -> Memory:
    table = _table(plan, dp_rank)
    costs = {stage: table[stage] for stage, home in homes(plan).items() if home == pp_rank}
    num_updated = sum(one.states for one in costs.values())
    num_copies = len(STATES[optimizer]) + (plan.engine == "deepspeed" and plan.layout.zero_stage > 0)
    parameters, states = sum(one.parameters for one in costs.values()), BYTES_EACH * num_updated * num_copies
    always = {
        "received": sum(one.received for one in costs.values()),
        "samples": sample_bytes(plan),
        "positions": position_bytes(plan, len(costs)),
        "buckets": sum(bucket_bytes(plan, stage) for stage in costs),
    }
    update = update_bytes(plan, num_updated) + sum(one.summed for one in costs.values())
    lasts = in_buckets(plan) and not always["buckets"]
    held = highest(steps(plan, pp_rank), costs, always=sum(always.values()), update=update, lasts=lasts)
    at_peak = {"parameters": parameters, "optimizer": states, **held.at_peak._asdict()}
    return Memory(
        rank=plan.rank_at(pp_rank=pp_rank, dp_rank=dp_rank),
        parameters=parameters,
        optimizer=states,
        **held.most._asdict(),
        peak=sum(at_peak.values()),
        host=_host_bytes(plan, parameters, held.most.gradients, states),
        peak_at=held.peak_at,
        activations_by_kind=MappingProxyType(held.kinds),
        buffers_by_kind=MappingProxyType({kind: size for kind, size in (always | held.buffers).items() if size}),
        at_peak=MappingProxyType({category: at_peak[category] for category in CATEGORIES}),
    )


@lru_cache(maxsize=64)
def _table(plan: Plan, dp_rank: int) -> dict[int, Costs]:
    """Every stage's costs; stages that are alike share theirs."""
    alike: dict[tuple[object, ...], Costs] = {}
    table = {}
    last = plan.num_stages - 1
    for stage in range(plan.num_stages):
        ends = (stage == 0, stage == last, len(plan.layers(stage)))
        key = (*ends, passes_on(plan, stage), stage > 0 and passes_on(plan, stage - 1))
        if key not in alike:
            alike[key] = costs_of(plan, stage, dp_rank)
        table[stage] = alike[key]
    return table


def _host_bytes(plan: Plan, parameters: int, gradients: int, states: int) -> int:
    """What DeepSpeed keeps in host memory: optimizer states and gradients, and weights with `offload:all`.

    Ren et al. 2021 (ZeRO-Offload, arXiv 2101.06840, section 3.3).
    """
    if plan.layout.offload == "none":
        return 0
    moved = states + (gradients if plan.layout.zero_stage > 1 else 0)
    return moved + (parameters if plan.layout.offload == "all" else 0)
