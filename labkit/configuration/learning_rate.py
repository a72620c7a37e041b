"""The scheduler section."""

from collections.abc import Iterator, Mapping

from labkit.configuration.document import Document
from labkit.configuration.finding import Finding, mistake, note, risk
from labkit.spec.checks import nearest, shown

__all__ = ["check_learning_rate"]

_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")
_PARAMS: dict[str, tuple[str, ...]] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": ("total_num_steps", *_WARMUP),
    "WarmupCosineLR": (
        "total_num_steps",
        "warmup_min_ratio",
        "warmup_num_steps",
        "cos_min_ratio",
        "warmup_type",
        "last_batch_iteration",
    ),
    "OneCycle": (
        "cycle_min_lr",
        "cycle_max_lr",
        "decay_lr_rate",
        "cycle_first_step_size",
        "cycle_second_step_size",
        "cycle_first_stair_count",
        "cycle_second_stair_count",
        "decay_step_size",
        "cycle_momentum",
        "cycle_min_mom",
        "cycle_max_mom",
        "decay_mom_rate",
        "last_batch_iteration",
    ),
    "LRRangeTest": (
        "lr_range_test_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_step_rate",
        "lr_range_test_staircase",
        "last_batch_iteration",
    ),
}
_NEEDED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
_OTHER_NAMES = {
    "warmup_steps": "warmup_num_steps",
    "num_warmup_steps": "warmup_num_steps",
    "total_steps": "total_num_steps",
    "max_steps": "total_num_steps",
    "num_training_steps": "total_num_steps",
    "max_lr": "warmup_max_lr",
    "min_lr": "warmup_min_lr",
}
_SOURCE = "deepspeed/runtime/lr_schedules.py"


def check_learning_rate(doc: Document) -> Iterator[Finding]:
    """Find schedules that are not made, or run at another rate than the optimizer section says."""
    name, params = doc.values.get("scheduler.type"), doc.values.get("scheduler.params")
    section = doc.values.get("scheduler")
    if isinstance(section, Mapping) and name is None:
        rule = "without a type DeepSpeed ignores the section"
        yield mistake("scheduler.type", "scheduler without a type", rule, "Set type, such as WarmupDecayLR.", _SOURCE)
    if not isinstance(name, str) or name == "auto":
        return
    if name not in _PARAMS:
        near = nearest(name, _PARAMS)
        rule = f"DeepSpeed's schedules are {', '.join(_PARAMS)}; other names are classes of torch.optim.lr_scheduler"
        fact = f"scheduler type {shown(name)} is none of DeepSpeed's"
        if near:
            yield mistake("scheduler.type", fact, rule, f"Did you mean {near}?", _SOURCE)
        elif not name.endswith(("LR", "Restarts", "Plateau", "LRScheduler")):
            yield mistake("scheduler.type", fact, rule, "Use one of them.", _SOURCE)
        return
    given = params if isinstance(params, Mapping) else {}
    yield from _names(name, given)
    yield from _steps(name, given)
    yield from _rates(doc, name, given)
    if section is not None and doc.values.get("optimizer") is None:
        rule = "DeepSpeed makes the schedule for the optimizer that the caller passes; with Trainer both come from here"
        yield note("scheduler", "scheduler without an optimizer section", rule)


def _names(name: str, params: Mapping[str, object]) -> Iterator[Finding]:
    for key in params:
        if key in _PARAMS[name]:
            continue
        meant = _OTHER_NAMES.get(str(key))
        meant = meant if meant in _PARAMS[name] else nearest(str(key), _PARAMS[name])
        fact = f"scheduler.params.{str(key)[:60]} is no parameter of {name}"
        fix = f"Did you mean {meant}?" if meant else f"It takes {', '.join(_PARAMS[name][:4])}."
        yield mistake(f"scheduler.params.{str(key)[:60]}", fact, "its constructor refuses it (TypeError)", fix, _SOURCE)
    for key in _NEEDED.get(name, ()):
        if key not in params:
            yield mistake(
                f"scheduler.params.{key}",
                f"{name} without {key}",
                "its constructor has no default for it (TypeError: missing argument)",
                f"Set {key} (optimizer steps of the run)." if "steps" in key else f"Set {key}.",
                _SOURCE,
            )


def _steps(name: str, params: Mapping[str, object]) -> Iterator[Finding]:
    warmup, total = params.get("warmup_num_steps"), params.get("total_num_steps")
    path = "scheduler.params.warmup_num_steps"
    is_count = isinstance(warmup, int) and not isinstance(warmup, bool) and warmup > 0
    if name.startswith("Warmup") and warmup not in (None, "auto") and not is_count:
        fact = f"warmup_num_steps={shown(warmup)}"
        yield mistake(path, fact, "it is a whole number of steps, 1 or more", "Use 1 or more.", _SOURCE)
        return
    if isinstance(warmup, int) and isinstance(total, int | float) and total < warmup:
        yield risk(
            path,
            f"warmup_num_steps={warmup} is above total_num_steps={total:g}",
            "the rate never reaches its maximum, and then falls to 0",
            f"Use warmup_num_steps below {total:g}.",
            _SOURCE,
        )
    if name.startswith("Warmup") and params.get("warmup_type", "log") not in ("linear", "auto"):
        yield note(
            "scheduler.params.warmup_type",
            f"{name} warms up logarithmically",
            "that is the default: half of the rise comes in the first steps (the square root of their number)",
            "Set warmup_type to linear for a straight line.",
            _SOURCE,
        )


def _rates(doc: Document, name: str, params: Mapping[str, object]) -> Iterator[Finding]:
    optimizer = doc.values.get("optimizer.params")
    rate = optimizer.get("lr") if isinstance(optimizer, Mapping) else None
    if name not in ("WarmupLR", "WarmupDecayLR") or not isinstance(rate, int | float) or isinstance(rate, bool):
        return
    path, most = "scheduler.params.warmup_max_lr", params.get("warmup_max_lr")
    if most is None and rate != 0.001:
        is_default = name == "WarmupDecayLR"
        make = mistake if is_default else risk
        yield make(
            path,
            f"optimizer.params.lr={rate:g} and {name} without warmup_max_lr",
            "its default of 0.001 takes the place of the optimizer's rate"
            if is_default
            else "in older versions its default of 0.001 took the place of the optimizer's rate",
            f"Set warmup_max_lr to {rate:g}.",
            f"{_SOURCE}; DeepSpeed issue 7303",
        )
    elif isinstance(most, int | float) and most != rate:
        yield risk(
            path,
            f"warmup_max_lr={most:g} while optimizer.params.lr={rate:g}",
            "the schedule's rate is in force after the first step",
            "Make both equal.",
            _SOURCE,
        )
