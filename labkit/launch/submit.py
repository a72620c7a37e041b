"""Start a run: check what can be checked before any rank is asked, then submit."""

import dataclasses
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import psutil

from labkit.errors import ClusterError, PlanError, ranks_text
from labkit.launch.run import Run
from labkit.plan import Plan, build
from labkit.predict import state_bytes
from labkit.spec import Fp8, Pace, Training

if TYPE_CHECKING:
    from labkit.cluster import Ranks

__all__ = ["last_run", "train"]

_starting = threading.Lock()
_runs: "weakref.WeakKeyDictionary[Ranks, Run]" = weakref.WeakKeyDictionary()


def train(
    ranks: "Ranks",
    plan: Plan,
    num_steps: int = 10,
    seed: int = 0,
    *,
    optimizer: str = "adamw",
    learning_rate: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    clip_norm: float | None = 1.0,
    start: str = "fresh",
    data: str | None = None,
    pace: Pace | None = None,
    trace: bool = True,
    fp8: Fp8 | None = None,
    record_fp8: bool = False,
    block: bool = True,
    progress: bool = True,
) -> Run:
    """Train for real on live ranks.

    Args:
        ranks: the ranks; the first `plan.world_size` take part.
        plan: what `plan.build` gave.
        num_steps: optimizer steps.
        seed: decides samples and initial weights, whatever the layout.
        optimizer: "adamw" or "sgd".
        learning_rate: of every step.
        betas: AdamW's; SGD ignores them.
        weight_decay: decoupled in AdamW.
        clip_norm: the global gradient norm to clip to; None: do not clip.
        start: "fresh", or "live" to go on from the ranks' live state.
        data: a file or folder to train on as bytes; None: the Python standard library's source.
        pace: declared durations: each forward and backward lasts at least so long, on every or on each stage.
        trace: record what every rank does.
        fp8: how a layout with the token fp8 casts; None: delayed scaling with its defaults. `run.fp8_library` says what
            multiplied: Transformer Engine on GPUs that have it, else torch.
        record_fp8: record what the casts do to every tensor, for `run.fp8`.
        block: wait for the end. Ctrl-C then ends the run, which `last_run(ranks)` still gives.
        progress: show one updating line while waiting.

    Returns:
        The run: ended when `block`, else going on in the background.

    Raises:
        PlanError: options or plan do not fit, before any rank is asked.
        ClusterError: ranks are dead or busy with another run.
        RankError: code raised on ranks. RankLost: a rank died. Both only when `block`; else `run.wait()` raises.
    """
    training = Training(
        num_steps=num_steps,
        seed=seed,
        optimizer=optimizer,
        learning_rate=learning_rate,
        betas=betas,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        start=start,
        data=data,
        pace=pace,
        trace=trace,
        fp8=fp8,
        record_fp8=record_fp8,
    )
    if training.data is not None:
        training = dataclasses.replace(training, data=find_data(training.data))
    check_are_ranks(ranks)
    check_plan(plan, len(ranks))
    training.check_precision(plan.layout.precision)
    if pace is not None:
        pace.check_stages(plan.layout.num_stages)
    if ranks.backend == "gloo":
        check_memory(plan, training.optimizer, psutil.virtual_memory().available)
    with _starting:
        devices = check_ranks(ranks)
        run = Run(ranks, plan, training, devices[: plan.world_size])
        run._begin(ranks)
        _runs[ranks] = run
    return run._follow(progress=progress) if block else run


def last_run(ranks: "Ranks") -> Run | None:
    """The newest run on these ranks, also one that Ctrl-C or an error took from a cell."""
    return _runs.get(ranks)


def find_data(data: str) -> str:
    """The whole path of the data: a rank's working directory need not be the notebook's."""
    path = os.path.abspath(os.path.expanduser(data))
    try:
        os.stat(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise PlanError(
            f"data={data[:80]!r} is no usable path ({str(why).lower()}, looked for in {os.getcwd()}): "
            "training reads a file or a folder of files. Give one that is there."
        ) from None
    return path


def check_are_ranks(ranks: Any) -> None:
    if not hasattr(ranks, "clock_offsets"):
        raise PlanError(
            f"ranks is a {type(ranks).__name__}: what lk.cluster.start gave comes first, then the plan. "
            "Use lk.launch.train(ranks, plan)."
        )


def check_plan(plan: Any, num_ranks: int) -> None:
    if not isinstance(plan, Plan):
        raise PlanError(
            f"plan is a {type(plan).__name__}, not a Plan: ranks run a plan. "
            "Make one with lk.plan.build(model, layout)."
        )
    layout = plan.layout
    if build(plan.model, layout, plan.schedule) != plan:  # a plan put together by hand, which may deadlock on ranks
        raise PlanError(
            f"the plan of '{layout}' is not what lk.plan.build makes of it: ranks run a plan that was checked. "
            "Make one with lk.plan.build(model, layout)."
        )
    if layout.world_size > num_ranks:
        raise PlanError(
            f"dp({layout.dp}) * pp({layout.pp}) * tp({layout.tp}) = {layout.world_size} but {num_ranks} ranks are up: "
            f"each rank has one place in the mesh. Start {layout.world_size} ranks or change an axis."
        )


def check_memory(plan: Plan, optimizer: str, available_bytes: int) -> None:
    """Refuse what cannot fit the memory that CPU ranks share: it would end the machine, not only the run."""
    each = [state_bytes(plan, rank, optimizer) for rank in range(plan.world_size)]
    if sum(each) > available_bytes:
        most = max(each)
        raise PlanError(
            f"weights, gradients and optimizer states of '{plan.layout}' take {sum(each) / 2**30:,.1f} GiB "
            f"({most / 2**30:,.1f} GiB on rank {each.index(most)}), but {available_bytes / 2**30:,.1f} GiB are free: "
            f"CPU ranks share this machine's memory. {_smaller(plan, optimizer, available_bytes)}"
        )


def _smaller(plan: Plan, optimizer: str, available_bytes: int) -> str:
    """What would fit: more sharding if that does, else a smaller model."""
    try:
        sharded = build(plan.model, dataclasses.replace(plan.layout, zero_stage=3), plan.schedule)
    except PlanError:
        sharded = plan
    if sum(state_bytes(sharded, rank, optimizer) for rank in range(sharded.world_size)) <= available_bytes:
        return f"Use '{sharded.layout}'."
    return "Train a smaller model, for example Model.preset('tiny'); larger ones are to plan with."


def check_ranks(ranks: "Ranks") -> list[str]:
    """Refuse ranks that train already or are dead; returns every rank's device."""
    before = _runs.get(ranks)
    if before is not None and before.state == "running":
        raise ClusterError(
            f"{before} is still going on these ranks: ranks hold one training state. "
            "End it with run.stop(), or wait with run.wait()."
        )
    statuses = ranks.status()
    if lost := [status.rank for status in statuses if status.state == "lost"]:
        raise ClusterError(
            f"{ranks_text(lost)} of {len(ranks)} {'is' if len(lost) == 1 else 'are'} gone: training needs every rank. "
            f"Bring {'it' if len(lost) == 1 else 'them'} back with {'; '.join(f'ranks.restart({r})' for r in lost)}."
        )
    return [status.device for status in statuses]
