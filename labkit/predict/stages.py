"""Seconds of a plan's stages: of each pass of a micro-batch, of what goes between stages, and of the end of a step."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from labkit.plan import Plan
from labkit.predict.collectives import Reach, collective_time, reach
from labkit.predict.costs import Passes, Work, embedding, head, layer, seconds
from labkit.predict.software import Software
from labkit.spec import LINKS, Hardware

__all__ = ["StageSeconds", "Tail", "passes_s", "send_seconds", "stage_seconds", "stage_sums", "tails"]

UPDATE_BYTES = 28
"""Traffic of AdamW for one fp32 element: gradient, weight and two moments read (16), three of them written (12)."""

HOST_LINK = LINKS["pcie4"]
"""What is offloaded goes over 16 lanes of PCIe 4."""


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch at each stage.

    Attributes:
        forward_s: forward.
        inputs_s: backward of the inputs, with what is recomputed for it.
        weights_s: backward of the weights.
    """

    forward_s: list[float]
    inputs_s: list[float]
    weights_s: list[float]


class Tail(NamedTuple):
    """What a rank does after its last backward.

    Attributes:
        kind: the collective of the gradients over dp: "all_reduce" or "reduce_scatter".
        num_bytes: of the gradients in it; 0 where there is none.
        reduce_s: seconds of the collective.
        hidden_s: how much of them ran behind the backward.
        update_s: the optimizer's.
        gather_s: gathering updated weights.
        weight_bytes: of the weights in it.
    """

    kind: str
    num_bytes: int
    reduce_s: float
    hidden_s: float
    update_s: float
    gather_s: float
    weight_bytes: int

    @property
    def exposed_s(self) -> float:
        """From the end of the last backward to the end of the step.

        >>> Tail("all_reduce", 8, 3.0, 1.0, 0.5, 0.0, 8).exposed_s
        2.5
        """
        return self.reduce_s - self.hidden_s + self.update_s + self.gather_s

    def calls(self) -> list[tuple[str, float, int | None]]:
        """Return kind, seconds and bytes of what it is made of, in order."""
        found: list[tuple[str, float, int | None]] = []
        if self.num_bytes:
            found.append((self.kind, self.reduce_s, self.num_bytes))
        found.append(("optimizer", self.update_s, None))
        if self.gather_s:
            found.append(("all_gather", self.gather_s, self.weight_bytes))
        return found


def passes_s(
    parts: Sequence[tuple[Passes, int]], recompute: str, to_s: Callable[[Work], float]
) -> tuple[float, float, float]:
    """Return seconds of forward, backward of the inputs and backward of the weights of a stage made of these parts.

    Recomputed parts run again before the backward of the inputs: under "full" the whole forward, under "selective" the
    attention between projections (Korthikanti et al. 2022, arXiv 2205.05198, section 5).
    """
    forward, inputs, weights = _work(parts, recompute)
    return to_s(forward), to_s(inputs), to_s(weights)


def _work(parts: Sequence[tuple[Passes, int]], recompute: str) -> tuple[Work, Work, Work]:
    forward, inputs, weights = Work(), Work(), Work()
    for part, times in parts:
        forward = forward.plus(part.forward, times)
        inputs = inputs.plus(part.inputs, times)
        weights = weights.plus(part.weights, times)
        if recompute != "none" and times:
            again = part.forward if recompute == "full" else part.again
            inputs = inputs.plus(again, times)
    return forward, inputs, weights


def stage_seconds(plan: Plan, hardware: Hardware, software: Software) -> StageSeconds:
    """Return what a micro-batch takes at each stage, forward and backward."""
    layout = plan.layout
    tp = reach(layout.tp, 1, hardware.ranks_per_host)
    inner, first, last = _parts(plan, software)

    def to_s(work: Work) -> float:
        return seconds(work, hardware, software, layout.precision, tp)

    known: dict[tuple[int, bool, bool], tuple[float, float, float]] = {}
    rows = []
    for stage in range(plan.num_stages):
        shape = (len(plan.layers(stage)), *_ends(plan, stage))
        if shape not in known:
            found = passes_s([(inner, shape[0])], layout.recompute, to_s)
            ends = passes_s([(first, int(shape[1])), (last, int(shape[2]))], "none", to_s)
            both = [one + two for one, two in zip(found, ends, strict=True)]
            known[shape] = _with_gathering(plan, hardware, software, shape, (both[0], both[1], both[2]))
        rows.append(known[shape])
    return StageSeconds([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])


def _parts(plan: Plan, software: Software) -> tuple[Passes, Passes, Passes]:
    """What a layer, the embedding and the head cost a rank."""
    model, layout = plan.model, plan.layout
    tokens = layout.microbatch_size * model.seq_len
    width = 4 if layout.precision == "fp32" else 2
    return (
        layer(model, tokens, software, tp=layout.tp, sp=layout.sequence_parallel, width=width),
        embedding(model, tokens, software, tp=layout.tp, width=width),
        head(model, tokens, software, tp=layout.tp, width=width),
    )


def stage_sums(plan: Plan, software: Software) -> dict[str, list[list[float]]]:
    """Return the bytes of every sum over tp in a forward ("F") and a backward ("B", "I") of each stage."""
    inner, first, last = _parts(plan, software)
    found: dict[str, list[list[float]]] = {"F": [], "I": []}
    for stage in range(plan.num_stages):
        is_first, is_last = _ends(plan, stage)
        within = _work([(inner, len(plan.layers(stage)))], plan.layout.recompute)
        around = _work([(first, int(is_first)), (last, int(is_last))], "none")
        for kind, one, two in zip("FI", within, around, strict=False):
            sums = one.sums + two.sums
            found[kind].append([num_bytes for count, num_bytes in sums for _ in range(round(count))])
    return found | {"B": found["I"]}


def _with_gathering(
    plan: Plan,
    hardware: Hardware,
    software: Software,
    shape: tuple[int, bool, bool],
    computed: tuple[float, float, float],
) -> tuple[float, float, float]:
    """Add ZeRO-3's collectives: weights gathered, for the backward again where they were dropped, gradients scattered.

    With offloaded weights each gathering comes with the transfer of the rank's own part from the host.
    """
    layout, forward_s, inputs_s, weights_s = plan.layout, *computed
    if layout.zero_stage < 3 or layout.dp == layout.hybrid:
        return computed
    group = reach(layout.dp // layout.hybrid, layout.tp, hardware.ranks_per_host)
    num_layers, has_first, has_last = shape
    elements = num_layers * plan.model.num_layer_parameters / layout.tp
    elements += (has_first + has_last) * plan.model.vocab_size * plan.model.d_model / layout.tp
    weight_bytes = elements * (4 if layout.precision == "fp32" else 2)
    gather_s = collective_time("all_gather", weight_bytes, group, hardware)
    if layout.offload == "all":
        gather_s += weight_bytes / group.num_ranks / HOST_LINK.bytes_per_s
    scatter_s = collective_time("reduce_scatter", elements * software.gradient_bytes, group, hardware)
    forward_s += _exposed_s(gather_s, forward_s, software.dp_hidden)
    if layout.reshards:
        inputs_s += _exposed_s(gather_s, inputs_s, software.dp_hidden)
    return forward_s, inputs_s, weights_s + _exposed_s(scatter_s, weights_s, software.dp_hidden)


def _exposed_s(call_s: float, beside_s: float, share: float) -> float:
    """What of a collective nothing hides: its share runs behind as much computation as there is."""
    return call_s - min(share * call_s, beside_s)


def send_seconds(plan: Plan, hardware: Hardware, software: Software) -> list[float]:
    """Return seconds from each stage to the next; 0 where both are on one rank."""
    layout = plan.layout
    stream = 4 if layout.precision == "fp32" else software.stream_bytes
    num_bytes = stream * layout.microbatch_size * plan.model.seq_len * plan.model.d_model
    if layout.sequence_parallel or software.splits_sends:
        num_bytes //= layout.tp
    hosts = [plan.rank_at(pp_rank=rank) // hardware.ranks_per_host for rank in range(layout.pp)]
    near_s, far_s = (collective_time("send", num_bytes, Reach(2, hosts), hardware) for hosts in (1, 2))
    homes = [plan.pp_rank_of(stage) for stage in range(plan.num_stages)]
    return [0.0 if one == two else near_s if hosts[one] == hosts[two] else far_s for one, two in pairwise(homes)]


def tails(plan: Plan, hardware: Hardware, software: Software, last_s: Sequence[float]) -> list[Tail]:
    """Return what each pipeline rank does after its last backward, which took `last_s`."""
    layout = plan.layout
    known: dict[tuple[object, float], Tail] = {}
    found = []
    for pp_rank in range(layout.pp):
        rank = plan.rank_at(pp_rank=pp_rank)
        shapes = tuple((len(plan.layers(stage)), *_ends(plan, stage)) for stage in plan.stages(rank))
        key = shapes, last_s[pp_rank]
        if key not in known:
            known[key] = _tail(plan, hardware, software, plan.num_parameters(rank), last_s[pp_rank])
        found.append(known[key])
    return found


def _ends(plan: Plan, stage: int) -> tuple[bool, bool]:
    """Whether a stage is the first, and the last."""
    return stage == 0, stage == plan.num_stages - 1


def _tail(plan: Plan, hardware: Hardware, software: Software, elements: int, last_s: float) -> Tail:
    layout = plan.layout
    sharded = reach(layout.dp // layout.hybrid, layout.tp, hardware.ranks_per_host)
    replicas = reach(layout.hybrid, layout.tp * sharded.num_ranks, hardware.ranks_per_host)
    gradient_bytes = elements * software.gradient_bytes
    weight_bytes = elements * (4 if layout.precision == "fp32" else 2)
    kind, reduce_s, gather_s = "all_reduce", 0.0, 0.0
    if layout.zero_stage == 0:
        group = reach(layout.dp, layout.tp, hardware.ranks_per_host)
        reduce_s = collective_time("all_reduce", gradient_bytes, group, hardware)
    elif layout.zero_stage < 3:
        kind = "reduce_scatter"
        reduce_s = collective_time("reduce_scatter", gradient_bytes, sharded, hardware)
        gather_s = collective_time("all_gather", weight_bytes, sharded, hardware)
    if layout.hybrid > 1:
        reduce_s += collective_time("all_reduce", gradient_bytes / sharded.num_ranks, replicas, hardware)
    hidden_s = min(software.dp_hidden * (reduce_s + gather_s), last_s, reduce_s)
    owned = elements / sharded.num_ranks if layout.zero_stage else elements
    update_s = UPDATE_BYTES * owned / (hardware.memory_bytes_per_s * hardware.memory_efficiency)
    if layout.offload != "none":  # gradients go to the host, weights come back
        update_s = (software.gradient_bytes + 4) * owned / HOST_LINK.bytes_per_s
    return Tail(kind, gradient_bytes if reduce_s else 0, reduce_s, hidden_s, update_s, gather_s, weight_bytes)
