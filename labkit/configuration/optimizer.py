"""The optimizer section, and gradient clipping."""

from collections.abc import Iterator, Mapping

from labkit.configuration.document import Document
from labkit.configuration.finding import Finding, mistake, note, risk
from labkit.spec.checks import nearest, shown

__all__ = ["check_optimizer"]

_DEEPSPEED = ("adam", "adamw", "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd")
_TORCH = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
)
_GONE = ("onebitadam", "zerooneadam", "onebitlamb")
_ZERO_TAKES = ("adam", "adamw", "adagrad", "lion", "muon")
_ADAM_PARAMS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "bias_correction",
    "adam_w_mode",
    "torch_adam",
    "amsgrad",
    "set_grad_none",
    "fp32_optimizer_states",
    "foreach",
    "maximize",
    "capturable",
    "differentiable",
    "fused",
)
_OTHER_NAMES = {
    "learning_rate": "lr",
    "beta1": "betas",
    "beta2": "betas",
    "adam_beta1": "betas",
    "epsilon": "eps",
    "adam_epsilon": "eps",
    "wd": "weight_decay",
    "decay": "weight_decay",
}
_ENGINE = "deepspeed/runtime/engine.py _configure_basic_optimizer"


def check_optimizer(doc: Document) -> Iterator[Finding]:
    """Find optimizers that DeepSpeed does not make, or makes differently."""
    name = doc.values.get("optimizer.type")
    section = doc.values.get("optimizer")
    yield from _clipping(doc)
    if isinstance(section, Mapping) and name is None:
        rule = "without a type DeepSpeed ignores the section"
        yield mistake("optimizer.type", "optimizer without a type", rule, "Set type, such as AdamW.", _ENGINE)
    elif isinstance(name, str) and name != "auto":
        yield from _type(doc, name)
        yield from _params(doc, name)
    elif section is None and doc.stage in (1, 2) and doc.facts.is_hugging_face is not True:
        yield note(
            "optimizer",
            f"no optimizer section with stage {doc.stage}",
            f"the caller must pass an optimizer ('zero stage {doc.stage} requires an optimizer')",
        )


def _type(doc: Document, name: str) -> Iterator[Finding]:
    lower, path = name.lower(), "optimizer.type"
    if lower in _GONE:
        if doc.facts.at_least(0, 19) is False and doc.stage < 2:
            return
        rule = "1-bit optimizers are gone from DeepSpeed 0.19, and never worked with ZeRO 2 and 3"
        yield mistake(path, f"optimizer type {shown(name)}", rule, "Use AdamW.", _ENGINE)
        return
    if lower not in _DEEPSPEED and name not in _TORCH:
        known = {one: one.capitalize() for one in _DEEPSPEED} | {one.lower(): one for one in _TORCH}
        near = known.get(lower) or known.get(nearest(name, known) or "")
        rule = "DeepSpeed takes Adam, AdamW, Adagrad, Lamb, Lion, Muon and the classes of torch.optim, spelled as there"
        yield mistake(
            path,
            f"optimizer type {shown(name)} is unknown",
            rule,
            f"Did you mean {near}?" if near else "Use AdamW.",
            _ENGINE,
        )
        return
    if doc.stage and lower not in _ZERO_TAKES and not doc.flag("zero_allow_untested_optimizer"):
        yield mistake(
            "zero_allow_untested_optimizer",
            f"optimizer {name} with ZeRO stage {doc.stage}",
            "ZeRO takes Adam, AdamW, Adagrad, Lion and Muon, and others only when told to ('untested ZeRO Optimizer')",
            "Set zero_allow_untested_optimizer to true.",
            "deepspeed/runtime/zero/utils.py",
        )
    if lower == "lamb" and doc.has("fp16.loss_scale") and (doc.number("fp16.loss_scale") or 0) > 0:
        rule = "DeepSpeed asks for dynamic loss scaling with it"
        yield mistake("fp16.loss_scale", "optimizer Lamb with a fixed loss scale", rule, "Set fp16.loss_scale to 0.")


def _params(doc: Document, name: str) -> Iterator[Finding]:
    path = "optimizer.params"
    params = doc.values.get(path)
    if not isinstance(params, Mapping):
        return
    if "max_grad_norm" in params:
        value = shown(params["max_grad_norm"])
        rule = "DeepSpeed refuses it as a parameter of an optimizer"
        fix = f"Move it to the top: gradient_clipping={value}."
        yield mistake(f"{path}.max_grad_norm", f"optimizer.params.max_grad_norm={value}", rule, fix, _ENGINE)
    for key in ("lr", "eps", "weight_decay"):
        given = params.get(key)
        if isinstance(given, str) and given != "auto":
            fact = f"optimizer.params.{key}={shown(given)} is text"
            yield mistake(
                f"{path}.{key}", fact, "the optimizer computes with it", f"Write {given[:40]} without quotes."
            )
    yield from _betas(params.get("betas"))
    if name.lower() not in ("adam", "adamw"):
        return
    for key in params:
        if str(key) in _ADAM_PARAMS or key == "max_grad_norm":
            continue
        meant = _OTHER_NAMES.get(str(key)) or nearest(str(key), _ADAM_PARAMS)
        make = mistake if meant else risk
        fact = f"optimizer.params.{str(key)[:60]} is no parameter of {name}"
        fix = f"Did you mean {meant}?" if meant else "Leave it out."
        yield make(f"{path}.{str(key)[:60]}", fact, "its constructor refuses unknown names (TypeError)", fix)
    if name.lower() == "adam" and params.get("adam_w_mode") is not False and params.get("weight_decay"):
        yield note(
            "optimizer.type",
            f"optimizer Adam with weight_decay={shown(params['weight_decay'])}",
            "DeepSpeed makes AdamW of it (decoupled decay) unless adam_w_mode is false",
            "Write AdamW, or adam_w_mode=false for Adam with L2.",
            _ENGINE,
        )


def _betas(value: object) -> Iterator[Finding]:
    if value is None or value == "auto":
        return
    numbers = value if isinstance(value, list | tuple) else []
    if len(numbers) != 2 or not all(isinstance(one, int | float) and 0 <= one < 1 for one in numbers):
        fact = f"optimizer.params.betas={shown(value)}"
        yield mistake("optimizer.params.betas", fact, "Adam has two rates from 0 to below 1", "Use [0.9, 0.999].")


def _clipping(doc: Document) -> Iterator[Finding]:
    if "gradient_clipping" in doc.values:
        return
    if "train_batch_size" in doc.values or "train_micro_batch_size_per_gpu" in doc.values or doc.stage:
        yield note(
            "gradient_clipping",
            "gradient_clipping is left out",
            "DeepSpeed 0.19 clips the global norm at 1.0 by default (older ones did not clip)",
            "Set it to 0 to switch clipping off.",
            "deepspeed/runtime/constants.py GRADIENT_CLIPPING_DEFAULT",
        )
