"""Training on the ranks: the loop, one step, and what they report."""

import gc
import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.errors import LabError, ranks_text
from labkit.plan import Plan
from labkit.rank import (
    data,
    deepspeed_engine,
    deepspeed_library,
    fp8,
    groups,
    mesh,
    optimizer,
    report,
    state,
    tensor_parallel,
    torch_engine,
)
from labkit.rank.mesh import Mesh
from labkit.rank.state import State
from labkit.spec import Training


def train(plan: Plan, training: Training) -> dict[str, Any] | None:
    """Train, and keep the state for a run with `start='live'`.

    The same seed and global batch give the same losses and gradient norms under every layout. A step ends early, after
    its update, on all ranks at once if any rank was asked to stop.

    Runs on: every rank of the world at once. Communicates: what the layout does, and one small all-reduce a step that
    carries loss, norm and the wish to stop.

    Returns:
        On the layout's ranks, equal on all but for `step_s`: "losses" (nats per token, mean over the global batch),
        "grad_norms" (global, before clipping), "step_s" (seconds of each step on this rank), "tokens_per_step",
        "stopped", "device" (its name) and "fp8_library" (`fp8.library`). None on ranks that the layout does without.

    Raises:
        PlanError: the layout takes more ranks than there are, the data is unusable, or there is no such live state.
        LabError: loss or gradient norm is not finite.
    """
    report.clear_stop()
    deepspeed_library.give_back_linear()
    own = mesh.of(plan)
    if own is None:
        state.end("the last plan did without this rank")
        return None
    text = data.load(training.data, plan.model)
    if training.start == "fresh":
        state.end("a run that was to start fresh did not begin")
    if training.start == "live":
        live = state.resume(plan, training)
    else:
        gc.collect()  # wrapped modules of an earlier state are cyclic
        live = build(plan, training, own)
    fp8.adjust(live.scaling, plan, training, own, live.recorder)
    state.keep(live)
    optimizer.adjust(live.optimizer, training)
    live.recorder.open(on=training.trace, pace=training.pace)
    try:
        result = _run(live, training, text)
    except BaseException as error:
        state.end(f"step {live.step} of the last run ended with {type(error).__name__}")
        raise
    live.recorder.close()
    return result


def build(plan: Plan, training: Training, own: Mesh, *, initialised: bool = True) -> State:
    """Make a fresh state with the plan's engine: weights, wrapped as the layout says, and an optimizer.

    Runs on: the layout's ranks at once.

    Args:
        plan: the plan.
        training: gives the seed and the optimizer.
        own: this rank's place and groups.
        initialised: False leaves the weights as memory is, for one who fills them.
    """
    build_state = deepspeed_engine.build if plan.engine == "deepspeed" else torch_engine.build
    return build_state(plan, training, own, initialised=initialised)


def gather_weights(live: State | None = None) -> dict[str, Tensor]:
    """Return every parameter of the live state, whole, by its name in the whole model.

    Runs on: the layout's ranks at once. Communicates: all-gathers over tp, and over dp where weights are sharded;
    broadcasts over pp.

    Raises:
        PlanError: no live state.
    """
    return (live or state.current()).weights.gather()


def _run(live: State, training: Training, text: Tensor) -> dict[str, Any]:
    losses: list[float] = []
    norms: list[float] = []
    seconds: list[float] = []
    stopped = False
    for _ in range(training.num_steps):
        start_s = time.monotonic()
        loss, norm, stopped = step(live, training, text)
        seconds.append(time.monotonic() - start_s)
        losses.append(loss)
        norms.append(norm)
        _report(live, loss, norm, seconds[-1])
        live.step += 1
        if stopped:
            break
    return {
        "losses": losses,
        "grad_norms": norms,
        "step_s": seconds,
        "tokens_per_step": live.plan.tokens_per_step,
        "stopped": stopped,
        "device": groups.device_name(),
        "fp8_library": fp8.library(live.scaling),
    }


def _report(live: State, loss: float, norm: float, step_s: float) -> None:
    if live.weights.mesh.rank == 0:
        report.emit("step", {"step": live.step, "loss": loss, "grad_norm": norm, "step_s": step_s})
    if live.recorder.on:
        report.emit("events", {"events": live.recorder.take()})


def step(live: State, training: Training, text: Tensor) -> tuple[float, float, bool]:
    """One optimizer step.

    Runs on: the layout's ranks at once.

    Returns:
        Global mean loss, global gradient norm, and whether any rank was asked to stop.

    Raises:
        LabError: loss or norm is not finite; weights are then still those before the step.
    """
    plan, recorder = live.plan, live.recorder
    recorder.begin_step(live.step)
    start = recorder.mark()
    tokens, targets = data.batch(
        text, plan.model, plan.layout, seed=training.seed, step=live.step, dp_rank=live.weights.mesh.place.dp_rank
    )
    device = groups.device()
    with tensor_parallel.loss_over_shards(plan.layout.tp), fp8.products(live.scaling):
        share = live.forward_backward(tokens.to(device), targets.to(device))
    loss, squared_norm, num_stops = _agree(live, share, live.update.squared_norm())
    norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
    if math.isfinite(loss) and math.isfinite(norm):
        norm = live.update.apply(norm, training.clip_norm)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        _refuse(live, training, loss, norm, share)
    fp8.end_step(live.scaling, live.weights.mesh, live.step)
    recorder.memory()
    recorder.add("step", start)
    return loss, norm, num_stops > 0


def _agree(live: State, share: Tensor, squared_norm: Tensor) -> tuple[float, float, float]:
    """Add up loss, squared norm and wishes to stop over the layout's ranks: the step's one small all-reduce."""
    own = live.weights.mesh
    if own.place.tp_rank > 0:
        share = torch.zeros_like(share)  # every tp rank has the whole loss
    stop = torch.tensor(float(report.stop_requested()), device=share.device)
    sums = torch.stack([share.double(), squared_norm.double(), stop.double()])
    if own.members is not None:
        start = live.recorder.mark()
        dist.all_reduce(sums, group=own.members)
        live.recorder.add("all_reduce", start, group="world", num_bytes=sums.numel() * sums.element_size())
    loss, squared, num_stops = sums.tolist()
    return loss, squared, num_stops


def _refuse(live: State, training: Training, loss: float, norm: float, share: Tensor) -> None:
    """Raise an error that names the ranks where the loss went wrong. Communicates: one all-gather."""
    own = live.weights.mesh
    is_bad = torch.tensor([0.0 if math.isfinite(share.item()) else 1.0], device=share.device)
    everywhere = [is_bad]
    if own.members is not None:
        everywhere = [torch.empty_like(is_bad) for _ in range(live.plan.world_size)]
        dist.all_gather(everywhere, is_bad, group=own.members)
    bad = [rank for rank, flag in enumerate(everywhere) if flag.item()]
    where = f" on {ranks_text(bad)}" if bad else ""
    what = f"loss is {loss:g}" if bad else f"gradient norm is {norm:g}"
    fix = "a lower learning_rate" + (" or clip_norm=1.0" if training.clip_norm is None else "")
    raise LabError(
        f"{what} at step {live.step}{where}: numbers left the range of {live.plan.layout.precision} with "
        f"learning_rate={training.learning_rate:g}. Use {fix}."
    )
