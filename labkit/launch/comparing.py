"""Every layout against one rank, on live ranks, from the same weights and samples."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from labkit import plan as planning
from labkit.errors import ClusterError, LabError, PlanError, RankError, RankLost, RankTimeout, ranks_text
from labkit.launch import submit
from labkit.launch.equality import BANDS, Comparison, Parity, Reference, judge
from labkit.launch.progress import Line
from labkit.plan import Plan
from labkit.spec import Layout, Model, Training
from labkit.spec.checks import choices_text, flag, shown

if TYPE_CHECKING:
    from labkit.cluster import Ranks

__all__ = ["parity"]

KEEP = "labkit.rank.comparing:keep"
COMPARE = "labkit.rank.comparing:compare"
FORGET = "labkit.rank.comparing:forget"
FORGET_TIMEOUT_S = 30.0
BYTES_PER_WEIGHT = 4
OPTIMIZERS = ("adamw", "sgd")

# AdamW forgives a wrong scale of the gradients. SGD with this rate does not, nor does clipping that is active.
LEARNING_RATES = {"adamw": 1e-3, "sgd": 0.1}
WEIGHT_DECAYS = {"adamw": 0.1, "sgd": 0.0}
FIRST_CLIP_NORM = 1.0
"""AdamW's. SGD's is half of the first gradient norm, so that clipping is active at least in the first step."""


def parity(
    ranks: "Ranks",
    model: Model,
    layouts: Iterable[Layout | str | Plan],
    *,
    num_steps: int = 5,
    seed: int = 0,
    data: str | None = None,
    progress: bool = True,
    timeout_s: float = 600.0,
) -> Parity:
    """Train every layout and one rank from the same weights on the same samples, and compare them.

    Each layout trains under AdamW and under SGD with clipping active. One rank holds the whole model and takes the
    global batch at once (`dp1`, one micro-batch), in the layout's precision. Compared are the loss and the global
    gradient norm (before clipping) of every step, and all weights on all ranks after the last; a layout that differs is
    trained once more to see after which step its weights do.

    The ranks' live training state is replaced; afterwards there is none.

    Args:
        ranks: the ranks; a layout may take fewer.
        model: what is trained.
        layouts: layouts or their texts, all with the same global batch size; or plans of the model, where a schedule is
            one's own.
        num_steps: steps. The bands (`BANDS`) hold for a few: rounding grows with every step.
        seed: decides samples and initial weights.
        data: as of `train`.
        progress: show one updating line.
        timeout_s: how long one run of one layout may take; then it counts as failed and the ranks are freed.

    Returns:
        The verdicts. A layout whose run fails has "failed" and why, and the others go on. When a rank is lost, or
        cannot be freed, the layouts that are left have "not run".

    Raises:
        PlanError: unequal global batch sizes, an impossible layout or one too large for the ranks, before anything
            runs.
        ClusterError: ranks are dead or busy with a run.
        RankError, RankLost, RankTimeout: one rank itself could not be trained, so there is nothing to compare with.
    """
    submit.check_are_ranks(ranks)
    settings = _settings(num_steps, seed, data)
    line = Line() if flag("progress", progress) else None
    plans = _plans(model, layouts)
    for plan in plans:
        submit.check_plan(plan, len(ranks))
    _check_batches(plans)
    ones = _one_rank_plans(plans)
    if ranks.backend == "gloo":
        _check_memory(plans, ones, num_steps)
    submit.check_ranks(ranks)
    work = _Work(ranks, line, num_runs=len(settings) * (len(ones) + len(plans)), timeout_s=timeout_s)
    try:
        references = _references(work, ones, settings)
        entries = tuple(_compare_all(work, plans, references, settings))
    finally:
        with contextlib.suppress(LabError):
            ranks.run(FORGET, timeout_s=FORGET_TIMEOUT_S)
    result = Parity(
        model=model,
        num_steps=settings["adamw"].num_steps,
        seed=settings["adamw"].seed,
        references=tuple(references.values()),
        entries=entries,
    )
    work.say(result.headline(), final=True)
    return result


class _Work:
    """Runs on the ranks, one after the other, and one line that says how far they are."""

    def __init__(self, ranks: "Ranks", line: Line | None, *, num_runs: int, timeout_s: float) -> None:
        self._ranks, self._line = ranks, line
        self._num_runs, self._num_begun = num_runs, 0
        self._timeout_s = timeout_s

    def keep(self, name: str, plan: Plan, training: Training) -> dict[str, Any]:
        """Train one rank, which keeps its weights under a name."""
        self._announce(plan, training)
        return self._run(KEEP, name, plan, training)

    def compare(self, name: str, plan: Plan, training: Training, reference: Reference) -> Comparison:
        """Train under a plan and compare; where it differs once more, to see after which step weights differ."""
        self._announce(plan, training)
        found = judge(plan.layout, reference, **self._run(COMPARE, name, plan, training, False))
        if found.is_good:
            return found
        again = judge(plan.layout, reference, **self._run(COMPARE, name, plan, training, True))
        return found if again.is_good else again

    def _announce(self, plan: Plan, training: Training) -> None:
        self._num_begun += 1
        self.say(f"parity {self._num_begun}/{self._num_runs}: {plan.layout}, {training.optimizer}")

    def _run(self, function: str, *args: object) -> dict[str, Any]:
        """What rank 0 returns."""
        found: dict[str, Any] = self._ranks.run(function, *args, timeout_s=self._timeout_s)[0]
        return found

    def say(self, text: str, *, final: bool = False) -> None:
        """Show a text in the line."""
        if self._line is not None:
            self._line.update(text, final=final)

    def free(self) -> str:
        """End what still runs; why that did not work, or ""."""
        try:
            self._ranks.interrupt()
        except LabError as error:
            return str(error)
        return ""


_Key = tuple[str, str]
"""Precision and optimizer of a reference."""


def _references(work: _Work, ones: list[Plan], settings: dict[str, Training]) -> dict[_Key, Reference]:
    """Train one rank under every precision and optimizer; rank 0 keeps its weights."""
    found = {}
    for plan in ones:
        clip_norm = FIRST_CLIP_NORM
        for optimizer, usual in settings.items():
            training = replace(usual, clip_norm=clip_norm)
            key = (plan.layout.precision, optimizer)
            result = work.keep(_name(key), plan, training)
            found[key] = Reference(
                layout=plan.layout,
                optimizer=optimizer,
                learning_rate=training.learning_rate,
                clip_norm=clip_norm,
                losses=tuple(result["losses"]),
                grad_norms=tuple(result["grad_norms"]),
            )
            # The first gradient is the same under every optimizer: clipped to half its norm, it is clipped for sure.
            clip_norm = result["grad_norms"][0] / 2 or FIRST_CLIP_NORM
    return found


def _compare_all(
    work: _Work, plans: list[Plan], references: dict[_Key, Reference], settings: dict[str, Training]
) -> Iterator[Comparison]:
    lost = ""
    for plan in plans:
        for optimizer, usual in settings.items():
            key = (plan.layout.precision, optimizer)
            reference = references[key]
            if lost:
                yield _without_result(plan.layout, optimizer, "not run", lost)
                continue
            training = replace(usual, clip_norm=reference.clip_norm)
            try:
                found = work.compare(_name(key), plan, training, reference)
            except (RankLost, ClusterError) as error:
                lost = str(error)
                yield _without_result(plan.layout, optimizer, "failed", lost)
            except RankTimeout as error:
                lost = work.free()
                yield _without_result(plan.layout, optimizer, "failed", str(error))
            except RankError as error:
                yield _without_result(plan.layout, optimizer, "failed", _reason(error))
            else:
                yield found


def _without_result(layout: Layout, optimizer: str, verdict: str, why: str) -> Comparison:
    return Comparison(
        layout=layout, optimizer=optimizer, verdict=verdict, verdicts={}, differences={}, weights={}, why=why
    )


def _reason(error: RankError) -> str:
    """What went wrong, without tracebacks."""
    by_text: dict[str, list[int]] = {}
    for rank, failure in sorted(error.failures.items()):
        by_text.setdefault(str(failure), []).append(rank)
    return " ".join(f"[{ranks_text(ranks)}] {text}" for text, ranks in by_text.items())


def _name(key: _Key) -> str:
    return " ".join(key)


def _settings(num_steps: int, seed: int, data: str | None) -> dict[str, Training]:
    found = {}
    for optimizer in OPTIMIZERS:
        training = Training(
            num_steps=num_steps,
            seed=seed,
            optimizer=optimizer,
            learning_rate=LEARNING_RATES[optimizer],
            weight_decay=WEIGHT_DECAYS[optimizer],
            data=data,
            trace=False,
        )
        whole_path = None if training.data is None else submit.find_data(training.data)
        found[optimizer] = replace(training, data=whole_path)
    return found


def _plans(model: Model, layouts: object) -> list[Plan]:
    """Each layout's plan once, in the order given."""
    if isinstance(layouts, Layout | str | Plan):
        layouts = [layouts]
    if not isinstance(layouts, Iterable):
        raise PlanError(f"layouts {shown(layouts)} is no list: give texts or Layout values, such as ['dp2', 'tp2 m2'].")
    found: dict[Layout, Plan] = {}
    for one in layouts:
        plan = _plan(model, one)
        if found.setdefault(plan.layout, plan) != plan:
            raise PlanError(
                f"2 schedules of one's own under '{plan.layout}': comparisons go by their layouts. Use 2 calls."
            )
    if not found:
        raise PlanError("layouts=[] names no layout: at least one is compared, such as ['dp2'].")
    return list(found.values())


def _plan(model: Model, one: object) -> Plan:
    if isinstance(one, Plan):
        if one.model != model:
            raise PlanError(
                f"the plan '{one.layout}' is of another model ({one.model}, not {model}): layouts of one model are "
                f"compared. Use lk.plan.build(model, layout)."
            )
        return one
    if not isinstance(one, Layout | str):
        raise PlanError(
            f"{shown(one)} among layouts is of type {type(one).__name__}: a layout is compared. "
            "Give 'dp2', Layout(dp=2) or a plan."
        )
    return planning.build(model, Layout.parse(one) if isinstance(one, str) else one)


def _check_batches(plans: list[Plan]) -> None:
    """Refuse unequal global batch sizes, with what makes them equal."""
    first = plans[0].layout
    wanted = first.global_batch_size
    for plan in plans:
        size = plan.layout.global_batch_size
        if size == wanted:
            continue
        fits = _with_batch(plan, wanted)
        if fits:
            fix = f"Use {choices_text([repr(str(one)) for one in fits])}"
        else:
            both = math.lcm(size, wanted)
            bigger = [
                replace(one, microbatch_size=one.microbatch_size * both // one.global_batch_size)
                for one in (first, plan.layout)
            ]
            fix = f"Use {' and '.join(repr(str(one)) for one in bigger)}, {both} samples each"
        raise PlanError(
            f"'{first}' takes {wanted} samples a step and '{plan.layout}' {size}: layouts compare over the same "
            f"samples. {fix}."
        )


def _with_batch(plan: Plan, size: int) -> list[Layout]:
    """The layout with that global batch size by another number or size of micro-batches, where that builds."""
    layout = plan.layout
    found = []
    for name, other in (("num_microbatches", "microbatch_size"), ("microbatch_size", "num_microbatches")):
        each = layout.dp * getattr(layout, other)
        if size % each:
            continue
        with contextlib.suppress(PlanError):
            found.append(planning.build(plan.model, replace(layout, **{name: size // each})).layout)
    return found


def _one_rank_plans(plans: list[Plan]) -> list[Plan]:
    """For each precision, one rank with the whole model and the whole global batch."""
    known = list(dict.fromkeys(precision for precision, _ in BANDS))
    found: dict[str, Plan] = {}
    for plan in plans:
        precision = plan.layout.precision
        if precision not in known:
            raise PlanError(
                f"'{plan.layout}' is in {precision} but rounding has bands in {choices_text(known)}: a difference is "
                f"judged by its precision's. Use '{replace(plan.layout, precision='bf16')}'."
            )
        one = Layout(microbatch_size=plan.layout.global_batch_size, precision=precision)
        found.setdefault(precision, planning.build(plan.model, one))
    return list(found.values())


def _check_memory(plans: list[Plan], ones: list[Plan], num_steps: int) -> None:
    """Refuse what cannot fit the memory that CPU ranks share, together with the weights that rank 0 keeps."""
    available = psutil.virtual_memory().available
    kept = len(ones) * len(OPTIMIZERS) * num_steps * BYTES_PER_WEIGHT * plans[0].model.num_parameters
    if kept > available:
        raise PlanError(
            f"one rank's weights after each of {num_steps} steps take {kept / 2**30:,.1f} GiB over "
            f"{len(ones) * len(OPTIMIZERS)} runs but {available / 2**30:,.1f} GiB are free: rank 0 keeps them to "
            "compare with. Compare a smaller model, for example Model.preset('tiny')."
        )
    for plan in [*ones, *plans]:
        submit.check_memory(plan, "adamw", available - kept)
