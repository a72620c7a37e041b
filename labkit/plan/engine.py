"""Which engine runs a layout: torch or DeepSpeed, and what neither runs."""

from dataclasses import replace

from labkit.errors import PlanError
from labkit.spec import Layout, Model

__all__ = ["check_twin", "choose"]


def choose(layout: Layout) -> str:
    """Return "torch" or "deepspeed".

    Left to choose, DeepSpeed runs ZeRO over several dp ranks, and whatever is offloaded; torch runs the rest: layouts
    without ZeRO, ZeRO together with tensor or pipeline parallelism, and forms of sharding that only torch has.

    Raises:
        PlanError: the engine that the layout names does not run it, or none does.

    >>> choose(Layout.parse("dp2 zero3")), choose(Layout.parse("dp2 zero3 hybrid2")), choose(Layout.parse("dp2"))
    ('deepspeed', 'torch', 'torch')
    >>> choose(Layout.parse("dp2 tp2 deepspeed"))
    Traceback (most recent call last):
        ...
    labkit.errors.PlanError: tp=2 with engine='deepspeed': its tensor parallel knows only other models. Use 'dp2 tp2'.
    """
    if layout.engine == "torch":
        if layout.offload != "none":
            fact = f"offload={layout.offload!r} with engine='torch'"
            raise _refused(fact, "only DeepSpeed offloads", layout, {"engine": "auto"})
        return "torch"
    is_forced = layout.engine == "deepspeed"
    if layout.offload != "none":
        _check_offload(layout)
    elif not is_forced and (layout.zero_stage == 0 or layout.dp == 1 or _needs_torch(layout)):
        return "torch"
    if is_forced:
        _check_deepspeed(layout)
    return "deepspeed"


def check_twin(model: Model, layout: Layout) -> None:
    """Refuse a matrix that two stages share in DeepSpeed's pipeline, which shares whole layers only.

    Raises:
        PlanError: it would be.
    """
    if layout.engine == "deepspeed" and layout.pp > 1 and model.tied_embeddings:
        fact = f"tied_embeddings=True with pp={layout.pp} and engine='deepspeed'"
        raise _refused(fact, "its pipeline shares whole layers, not their matrices", layout)


_FORMS: dict[str, tuple[object, str]] = {
    "hybrid": (1, "hybrid"),
    "reshard_after_forward": (None, "reshard or no_reshard"),
}


def _needs_torch(layout: Layout) -> bool:
    return layout.tp * layout.pp > 1 or any(getattr(layout, name) != usual for name, (usual, _) in _FORMS.items())


def _check_offload(layout: Layout) -> None:
    what = f"offload={layout.offload!r}"
    for name, value in (("tp", layout.tp), ("pp", layout.pp)):
        if value > 1:
            raise _refused(f"{what} with {name}={value}", "only DeepSpeed offloads, and it runs no such split", layout)
    if layout.zero_stage == 0:
        rule = "DeepSpeed offloads the optimizer of ZeRO 1 to 3"
        raise _refused(f"{what} with zero_stage=0", rule, layout, {"zero_stage": 1})
    for name, (usual, word) in _FORMS.items():
        if getattr(layout, name) != usual:
            rule = "only DeepSpeed offloads, and only torch shards so"
            raise _refused(f"{what} with {word}", rule, layout, {name: usual})


def _check_deepspeed(layout: Layout) -> None:
    what = "with engine='deepspeed'"
    if layout.tp > 1:
        raise _refused(f"tp={layout.tp} {what}", "its tensor parallel knows only other models", layout)
    if layout.pp > 1 and layout.zero_stage > 1:
        rule = "its pipeline runs ZeRO 0 and 1"
        raise _refused(f"pp={layout.pp} and zero_stage={layout.zero_stage} {what}", rule, layout)
    if layout.pp > 1 and layout.schedule != "1f1b":
        raise _refused(f"schedule={layout.schedule!r} {what}", "its pipeline runs 1f1b", layout)
    for name, (usual, word) in _FORMS.items():
        if getattr(layout, name) != usual:
            raise _refused(f"{word} {what}", "only torch shards so", layout)


def _refused(fact: str, rule: str, layout: Layout, *tries: dict[str, object]) -> PlanError:
    """A refusal that names the first layout that runs: with one of these changes, else without what only one has."""
    for changes in (*tries, {"engine": "auto"}):
        nearest = replace(layout, **changes)  # type: ignore[arg-type]
        if nearest != layout and _runs(nearest):
            break
    else:
        nearest = replace(layout, engine="auto", offload="none")
    return PlanError(f"{fact}: {rule}. Use '{nearest}'.")


def _runs(layout: Layout) -> bool:
    try:
        return bool(choose(layout))
    except PlanError:
        return False
