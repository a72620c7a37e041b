"""The nearest layout of a model that fits a device's memory."""

from collections.abc import Iterator
from dataclasses import replace

from labkit.errors import PlanError
from labkit.plan import Plan, build
from labkit.predict.memory import memory
from labkit.spec.checks import shown, whole

__all__ = ["fitting"]

_CHANGES = (
    {"zero_stage": 1},
    {"sequence_parallel": True},
    {"recompute": "selective"},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"recompute": "full"},
    {"microbatch_size": 1},
)
"""What leaves less to hold on the same ranks with the same samples, the cheapest in time first."""


def fitting(plan: Plan, memory_bytes: int, *, optimizer: str = "adamw") -> Plan:
    """Return the plan itself where it fits, else the first that does of those that shard or recompute more.

    Changes add up, the cheapest first: ZeRO-1, sequence parallelism, selective recomputation, ZeRO-2 and 3, full
    recomputation, micro-batches of one sample (and more of them).

    Args:
        plan: the plan.
        memory_bytes: of one device, such as `Hardware.memory_bytes`.
        optimizer: "adamw" or "sgd".

    Raises:
        PlanError: no plan or size, or none fits; the message says how much the smallest needs.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> model = Model.preset("llama3-8b")
    >>> str(fitting(plan.build(model, Layout.parse("dp8 tp8 b2 bf16")), 80 * 10**9).layout)
    'dp8 tp8 zero1 b2 bf16 sp'
    """
    given: object = plan
    if not isinstance(given, Plan):
        raise PlanError(f"plan {shown(plan)} is no Plan: use labkit.plan.build(model, layout).")
    memory_bytes = whole("memory_bytes", memory_bytes, maximum=2**60)
    least = None
    for one in _nearer(plan):
        most = memory(one, optimizer=optimizer).largest
        needed = most.peak - most.host
        if needed <= memory_bytes:
            return one
        if least is None or needed < least[0]:
            least = needed, one
    needed, smallest = least  # type: ignore[misc]
    raise PlanError(
        f"'{smallest.layout}' needs {_gib(needed)} on a rank and a device has {_gib(memory_bytes)}: nothing that "
        f"shards or recomputes more on {plan.world_size} ranks fits. Use more ranks or a smaller model."
    )


def _gib(num_bytes: int) -> str:
    size = num_bytes / 2**30
    return f"{size:,.1f} GiB" if size >= 1 else f"{size:.3g} GiB"


def _nearer(plan: Plan) -> Iterator[Plan]:
    yield plan
    layout = plan.layout
    for change in _CHANGES:
        changed = dict(change)
        if any(_is_less(getattr(layout, name), value) for name, value in change.items()):
            continue
        if "microbatch_size" in change:
            changed["num_microbatches"] = layout.num_microbatches * layout.microbatch_size
        try:
            one = build(plan.model, replace(layout, **changed))  # type: ignore[arg-type]
        except PlanError:
            continue
        if one.layout != layout:
            layout = one.layout
            yield one


def _is_less(has: object, wanted: object) -> bool:
    """Whether a change would shard or recompute less than the layout does."""
    order = ("none", "selective", "full")
    if isinstance(has, str):
        return order.index(str(wanted)) < order.index(has)
    return isinstance(has, int) and isinstance(wanted, int) and wanted > 1 and wanted < has
