"""Model x Layout -> Plan, or a refusal that says both numbers, the rule and the nearest layout that fits."""

import math
from dataclasses import replace

from labkit.errors import PlanError
from labkit.plan.eight_bits import check_sizes
from labkit.plan.engine import check_twin, choose
from labkit.plan.own import Schedule, read_own
from labkit.plan.plan import Plan
from labkit.schedule import check_virtual_stages
from labkit.spec import Layout, Model
from labkit.spec.checks import choices_text, divisors, shown

__all__ = ["build"]


def build(model: Model, layout: Layout, schedule: Schedule | None = None) -> Plan:
    """Lay `model` out over ranks.

    Args:
        model: what is trained.
        layout: how.
        schedule: a pipeline schedule of one's own, in place of the layout's: text with one line of computations per pp
            rank, such as "0F0 0F1 0B0 0B1", or lists of actions or texts. It is complete and free of deadlock, or
            refused. Sends and receives are added to it.

    Raises:
        PlanError: the layout contradicts itself, does not fit the model, or asks for what no engine runs;
            or `schedule` is none for it.

    >>> from labkit.spec import Layout, Model
    >>> plan = build(Model.preset("tiny"), Layout.parse("dp2 pp2 m4"))
    >>> plan.placement(3), plan.group_ranks("pp", 3)
    (Placement(dp_rank=1, tp_rank=0, pp_rank=1), [1, 3])
    >>> build(Model.preset("tiny"), Layout.parse("pp8"))
    Traceback (most recent call last):
        ...
    labkit.errors.PlanError: num_layers=4 is fewer than pp=8: every stage holds a layer. Use pp=4 or num_layers=8.
    >>> own = [["0F0", "0B0"], ["1F0", "1B0"]]
    >>> str(build(Model.preset("tiny"), Layout.parse("pp2 m1"), schedule=own).layout)
    'pp2 own m1'
    """
    if not isinstance(model, Model):
        raise PlanError(f"model {shown(model)} is no Model: use Model(...) or Model.preset('tiny').")
    if not isinstance(layout, Layout):
        hint = f"Layout.parse({layout!r})" if isinstance(layout, str) and len(layout) < 60 else "Layout(dp=2)"
        raise PlanError(f"layout {shown(layout)} is no Layout: use {hint}.")
    if schedule is not None:
        layout = replace(layout, schedule="own")
    _check_layout(layout)
    _check_tensor_parallel(model, layout)
    _check_pipeline(model, layout)
    if layout.precision == "fp8":
        check_sizes(model, layout)
    check_twin(model, layout)
    return Plan(model=model, layout=layout, engine=choose(layout), schedule=read_own(schedule, layout))


def _check_layout(layout: Layout) -> None:
    _check_schedule(layout)
    if layout.dp % layout.hybrid:
        raise PlanError(
            f"dp={layout.dp} is not divisible by hybrid={layout.hybrid}: replicas of a group are equally large. "
            f"Use hybrid={choices_text(divisors(layout.dp))}."
        )
    if layout.sequence_parallel and layout.tp == 1:
        raise PlanError("sequence_parallel=True with tp=1: it splits the sequence within tp. Use tp2 or leave sp out.")
    _check_sharding(layout)


def _check_schedule(layout: Layout) -> None:
    pp, m, name = layout.pp, layout.num_microbatches, layout.schedule
    check_virtual_stages(name, layout.num_virtual_stages)
    if name in ("gpipe", "1f1b"):
        return
    if pp == 1:
        what = "it orders" if name == "own" else "it interleaves"
        raise PlanError(f"pp=1 with schedule={name!r}: {what} a pipeline, 2 ranks or more. Use pp2 or 1f1b.")
    if name in ("interleaved", "interleaved_zero_bubble") and m % pp:
        near = -(-m // pp) * pp
        raise PlanError(
            f"num_microbatches={m} is not divisible by pp={pp}: schedule {name!r} goes in rounds of pp. Use m{near}."
        )
    if name == "dualpipe_v" and m < layout.num_stages:
        raise PlanError(
            f"num_microbatches={m} is fewer than the {layout.num_stages} stages of pp={pp} with schedule={name!r}: "
            f"both directions of the V must be full. Use m{layout.num_stages}."
        )


def _check_sharding(layout: Layout) -> None:
    zero = layout.zero_stage
    if layout.reshard_after_forward is not None and zero < 2:
        word = "reshard" if layout.reshard_after_forward else "no_reshard"
        raise PlanError(f"{word} with zero_stage={zero}: only sharded parameters are gathered. Use zero3 or drop it.")
    if layout.hybrid > 1 and zero < 2:
        raise PlanError(
            f"hybrid={layout.hybrid} with zero_stage={zero}: it replicates groups that shard gradients and parameters. "
            "Use zero3 or drop it."
        )
    if layout.offload == "all" and zero < 3:
        raise PlanError(
            f"offload='all' with zero_stage={zero}: only sharded parameters leave the device. "
            f"Use zero3 or offload:optimizer."
        )


def _check_tensor_parallel(model: Model, layout: Layout) -> None:
    tp = layout.tp
    rules = (
        ("num_heads", model.num_heads, "a tensor-parallel rank owns whole heads"),
        ("num_kv_heads", model.num_kv_heads, "a tensor-parallel rank owns whole key and value heads"),
        ("d_ff", model.d_ff, "a tensor-parallel rank owns an equal part of the feed-forward layer"),
        ("vocab_size", model.vocab_size, "a tensor-parallel rank owns an equal part of the vocabulary"),
    )
    together = math.gcd(*(size for _, size, _ in rules))
    for name, size, rule in rules:
        if size % tp == 0:
            continue
        own = math.gcd(size, model.num_heads, model.num_kv_heads)
        fix = f"Use tp={choices_text(divisors(own))}"
        if own != together:
            fits = choices_text(divisors(together))
            fix += f" (with d_ff={model.d_ff} and vocab_size={model.vocab_size}: {fits})"
        if name in ("d_ff", "vocab_size"):
            fix += f", or {name}={-(-size // tp) * tp}"
        raise PlanError(f"{name}={size} is not divisible by tp={tp}: {rule}. {fix}.")
    if layout.sequence_parallel and model.seq_len % tp:
        near = -(-model.seq_len // tp) * tp
        raise PlanError(
            f"seq_len={model.seq_len} is not divisible by tp={tp}: sequence parallel splits evenly. Use seq_len={near}."
        )


def _check_pipeline(model: Model, layout: Layout) -> None:
    if model.num_layers < layout.num_stages:
        most = model.num_layers // layout.num_virtual_stages
        stages = f"pp={layout.pp}"
        if layout.num_virtual_stages > 1:
            stages += f" * num_virtual_stages={layout.num_virtual_stages} = {layout.num_stages} stages"
        fix = f"pp={most} or " if most else ""
        if most == 1 and layout.num_virtual_stages > 1:  # one rank is no pipeline to interleave
            fix = "1f1b without v, or " if model.num_layers >= layout.pp else ""
        raise PlanError(
            f"num_layers={model.num_layers} is fewer than {stages}: every stage holds a layer. "
            f"Use {fix}num_layers={layout.num_stages}."
        )
