"""One published run as the predictor sees it, and the one constant that is fitted for a device and its software."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from labkit.predict import Reach, Software, collective_time, reach
from labkit.predict.costs import Passes, Work, embedding, head, layer, seconds
from labkit.predict.execution import totals
from labkit.predict.stages import UPDATE_BYTES, passes_s
from labkit.spec import Hardware, Model
from labkit.spec.checks import choice, number, whole
from labkit.spec.layout import PRECISIONS

LEAST, MOST = 0.05, 1.0
MOST_STAGES, MOST_RANKS, MOST_SAMPLES, SHORTEST, LONGEST = 1024, 2**20, 2**20, 1e-6, 1e9
"""Beyond any run, times in seconds: a row that says so is misprinted."""
NOTHING = Work()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and how long its step took.

    Beyond what a `Layout` can say there are context parallelism, stages of uneven or fractional depth, layers that do
    more than a dense one, and adapters instead of weights; everything else is computed by `labkit.predict`'s own parts.

    Attributes:
        stack: device and software, from the most to the least telling: the key of its constant.
        step_s: as measured.
        hardware: the device and its links.
        software: how the program runs a step.
        model: shapes; `seq_len` is the whole sequence.
        extra: what a layer does besides, forward; twice as much backward.
        extra_s: what a layer waits for besides, forward, and again backward.
        trains: the share of the weights that have gradients: 1, or 0 for adapters.
        idle: the share of the step in which the pipeline waits, where the schedule is none of this lab's.
        shards: over how many ranks of dp optimizer states are sharded; 0: over all.

    Raises:
        PlanError: a count below 1 or above any run's, or a time or size that is no number above 0.
    """

    stack: tuple[str, ...]
    step_s: float
    hardware: Hardware
    software: Software
    model: Model
    num_microbatches: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    num_virtual_stages: int = 1
    microbatch_size: float = 1
    precision: str = "bf16"
    recompute: str = "none"
    sequence_parallel: bool = False
    zero_stage: int = 0
    shards: int = 0
    extra: Work = NOTHING
    extra_s: float = 0.0
    trains: float = 1.0
    idle: float | None = None

    def __post_init__(self) -> None:
        number("step_s", self.step_s, minimum=SHORTEST, below=LONGEST)
        number("microbatch_size", self.microbatch_size, positive=True, below=MOST_SAMPLES)
        for name in ("num_microbatches", "dp", "tp", "pp", "cp", "num_virtual_stages"):
            whole(name, getattr(self, name))
        choice("precision", self.precision, PRECISIONS)
        whole("stages", self.pp * self.num_virtual_stages, maximum=MOST_STAGES)
        whole("ranks", self.dp * self.tp * self.pp * self.cp, maximum=MOST_RANKS)

    @property
    def depth(self) -> int:
        """Stages of a rank: interleaved where there is a pipeline and more than one."""
        return self.num_virtual_stages if self.pp > 1 else 1

    @cached_property
    def parts(self) -> tuple[Passes, Passes, Passes]:
        """Of a layer, the embedding and the head."""
        tokens = self.microbatch_size * self.model.seq_len / self.cp
        options = {"tp": self.tp, "width": 4 if self.precision == "fp32" else 2}
        inner = layer(self.model, tokens, self.software, sp=self.sequence_parallel, **options)
        inner = Passes(
            inner.forward.plus(self.extra), inner.inputs.plus(self.extra, 2), Work().plus(inner.weights, self.trains),
            inner.again,
        )  # fmt: skip
        return (
            inner,
            embedding(self.model, tokens, self.software, **options),
            head(self.model, tokens, self.software, **options),
        )

    @property
    def flops(self) -> float:
        """Useful operations of a step on one device."""
        samples = self.num_microbatches * self.microbatch_size * self.dp
        return samples * self.model.seq_len * self.model.flops_per_token / (self.dp * self.tp * self.pp * self.cp)

    def seconds(self, efficiency: float) -> float:
        """Predict the step where products reach this share of the peak."""
        hardware = replace(self.hardware, product_efficiency=efficiency)
        rows = self._stages(hardware)
        durations = dict(zip("FIW", zip(*rows, strict=True), strict=True))
        if self.idle is not None:
            whole_s = sum(sum(row) for row in rows) / self.pp
            return self.num_microbatches * whole_s / (1 - self.idle)
        send_s = self._send_s(hardware)
        m, p = self.num_microbatches, self.pp
        schedule, rounded = ("interleaved", -(-m // p) * p) if self.depth > 1 else ("1f1b", m)
        sends_s = [send_s] * (len(rows) - 1)
        found = totals(schedule, p, rounded, self.depth, durations, sends_s)
        each_s = max(found.busy_s) / rounded
        step_s = max(found.ends_s) - (rounded - m) * each_s
        return step_s + self._tail_s(hardware, sum(rows[0][1:]))

    def _stages(self, hardware: Hardware) -> list[tuple[float, float, float]]:
        inner, first, last = self.parts
        tp = reach(self.tp, 1, hardware.ranks_per_host)

        def to_s(work: Work) -> float:
            return seconds(work, hardware, self.software, self.precision, tp)

        layer_s = passes_s([(inner, 1)], self.recompute, to_s)
        layer_s = (layer_s[0] + self.extra_s, layer_s[1] + self.extra_s, layer_s[2])
        if self.zero_stage == 3:
            layer_s = self._gathered(hardware, layer_s)
        first_s, last_s = (passes_s([(part, 1)], "none", to_s) for part in (first, last))
        stages = self.pp * self.depth
        rows = []
        for stage in range(stages):
            depth = self._depth(stage, stages)
            rows.append(
                tuple(
                    depth * one + (stage == 0) * two + (stage == stages - 1) * three
                    for one, two, three in zip(layer_s, first_s, last_s, strict=True)
                )
            )
        return rows

    def _depth(self, stage: int, stages: int) -> float:
        """Layers of a stage: whole ones, or parts where there are fewer layers than stages."""
        if self.model.num_layers < stages:
            return self.model.num_layers / stages
        each, more = divmod(self.model.num_layers, stages)
        return each + (stage < more)

    def _gathered(self, hardware: Hardware, layer_s: tuple[float, float, float]) -> tuple[float, float, float]:
        """ZeRO-3 gathers a layer's weights for each forward and backward, and scatters its gradients."""
        group = reach(self.dp * self.cp, self.tp, hardware.ranks_per_host)
        elements = self.model.num_layer_parameters / self.tp
        gather_s = collective_time("all_gather", 2 * elements, group, hardware)
        scatter_s = collective_time("reduce_scatter", self.software.gradient_bytes * elements, group, hardware)
        hidden = self.software.dp_hidden
        forward_s, inputs_s, weights_s = layer_s
        return (
            forward_s + gather_s - min(hidden * gather_s, forward_s),
            inputs_s + gather_s - min(hidden * gather_s, inputs_s),
            weights_s + scatter_s - min(hidden * scatter_s, weights_s),
        )

    def _send_s(self, hardware: Hardware) -> float:
        if self.pp == 1:
            return 0.0
        tokens = self.microbatch_size * self.model.seq_len / self.cp
        num_bytes = self.software.stream_bytes * tokens * self.model.d_model
        if self.sequence_parallel or self.software.splits_sends:
            num_bytes /= self.tp
        hosts = 1 if self.tp * self.dp * self.cp * self.pp <= hardware.ranks_per_host else 2
        return collective_time("send", num_bytes, Reach(2, hosts), hardware)

    def _tail_s(self, hardware: Hardware, last_s: float) -> float:
        """Gradients over dp, the optimizer, and weights gathered; the largest stage counts."""
        depth = max(self._depth(stage, self.pp) for stage in range(self.pp))
        elements = self.trains * (
            depth * self.model.num_layer_parameters + self.model.vocab_size * self.model.d_model
        ) / self.tp  # fmt: skip
        ranks = self.dp * self.cp
        sharded = self.zero_stage > 0
        update_s = UPDATE_BYTES * elements / (ranks if sharded else 1)
        update_s /= hardware.memory_bytes_per_s * hardware.memory_efficiency
        if self.zero_stage == 3 or ranks == 1:
            return update_s
        group = reach(ranks, self.tp, hardware.ranks_per_host)
        gradients = self.software.gradient_bytes * elements
        if sharded and self.shards:  # states sharded within a part of dp only
            inner = reach(self.shards, self.tp, hardware.ranks_per_host)
            reduce_s = collective_time("all_reduce", gradients, group, hardware)
            gather_s = collective_time("all_gather", 2 * elements, inner, hardware)
        elif sharded:
            reduce_s = collective_time("reduce_scatter", gradients, group, hardware)
            gather_s = collective_time("all_gather", 2 * elements, group, hardware)
        else:
            reduce_s, gather_s = collective_time("all_reduce", gradients, group, hardware), 0.0
        total_s = reduce_s + gather_s
        return update_s + total_s - min(self.software.dp_hidden * total_s, last_s)


Stack = tuple[str, ...]


def own_efficiency(case: Case) -> float:
    """The efficiency at which this run alone is predicted as it was.

    A step is a part that does not depend on it, and the rest over it: found from two predictions near by.
    """
    found = case.hardware.product_efficiency
    for _ in range(2):
        far = found * 0.8
        near_s, far_s = case.seconds(found), case.seconds(far)
        slope = (far_s - near_s) / (1 / far - 1 / found)
        rest_s = near_s - slope / found
        found = min(MOST, max(LEAST, slope / (case.step_s - rest_s))) if case.step_s > rest_s else MOST
    return found


def constants(cases: Iterable[Case], own: Mapping[int, float]) -> dict[Stack, float]:
    """One efficiency for each stack, at which as many runs are predicted too long as too short.

    And for what stacks have in common: a release that is not known has the constant of its device.
    """
    groups: dict[Stack, list[float]] = {}
    for case in cases:
        for length in range(1, len(case.stack) + 1):
            groups.setdefault(case.stack[:length], []).append(own[id(case)])
    return {key: statistics.median(group) for key, group in groups.items()}


def efficiency(case: Case, known: Mapping[Stack, float]) -> float:
    """The constant of a run's stack; the data sheet's where nothing is known of its device."""
    for length in range(len(case.stack), 0, -1):
        if case.stack[:length] in known:
            return known[case.stack[:length]]
    return case.hardware.product_efficiency


def crossed(cases: Sequence[Case], own: Mapping[int, float]) -> list[float]:
    """Seconds of every run with constants that were fitted to the other half of its stack."""
    counts: dict[Stack, int] = {}
    sides = []
    for case in cases:
        counts[case.stack] = counts.get(case.stack, 0) + 1
        sides.append(counts[case.stack] % 2)
    known = [constants((one for one, at in zip(cases, sides, strict=True) if at != side), own) for side in (0, 1)]
    return [case.seconds(efficiency(case, known[side])) for case, side in zip(cases, sides, strict=True)]
