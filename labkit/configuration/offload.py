"""Offload to host memory and NVMe."""

from collections.abc import Iterator

from labkit.configuration.batch import data_parallel_ranks
from labkit.configuration.document import Document
from labkit.configuration.finding import Finding, mistake, note, risk

__all__ = ["check_offload", "state_bytes"]

_ZERO = "zero_optimization"
_OPTIMIZER, _PARAM = f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param"
_OPEN_OPTIMIZERS = ("adam", "adamw", "adagrad", "lion", "muon")
_CLIENT = "deepspeed/runtime/engine.py _configure_optimizer"


def check_offload(doc: Document) -> Iterator[Finding]:
    """Find offload that does nothing, is refused, or is not needed."""
    optimizer, param, stage = doc.device("offload_optimizer"), doc.device("offload_param"), doc.stage
    if param != "none" and stage != 3:
        yield mistake(
            _PARAM,
            f"offload_param.device={param} with stage {stage}",
            "only stage 3 shards parameters, so only it can offload them: here they stay on the GPU without a word",
            "Use stage 3, or drop offload_param.",
            "deepspeed/runtime/zero/config.py",
        )
    if optimizer != "none" and stage == 0:
        yield mistake(
            _OPTIMIZER,
            f"offload_optimizer.device={optimizer} with stage 0",
            "optimizer offload is built on ZeRO: it works in stages 1, 2 and 3",
            "Use stage 1 or more.",
            "deepspeed/runtime/zero/config.py",
        )
    if optimizer == "cpu" and stage in (1, 2):
        yield _stages_with_offload(stage)
    if optimizer != "none" and stage:
        yield from _optimizer(doc)
    yield from _nvme(doc, optimizer, param)
    yield from _ratio(doc, optimizer)
    if (optimizer != "none" or (param != "none" and stage == 3)) and stage:
        yield from _need(doc, stage)


def _stages_with_offload(stage: int) -> Finding:
    text = (
        "gradients stay whole on each GPU until the step: more GPU memory than stage 2, and often faster"
        if stage == 1
        else "gradients go to host memory as they are reduced: less GPU memory than stage 1, and often slower"
    )
    return note(
        _OPTIMIZER,
        f"stage {stage} with optimizer offload",
        f"it is allowed (stages 1, 2 and 3): {text}",
        "",
        "DeepSpeed issue 2174, pull request 2178",
    )


def _optimizer(doc: Document) -> Iterator[Finding]:
    name = doc.text("optimizer.type")
    if name.lower() in _OPEN_OPTIMIZERS:
        if name.lower() in ("adam", "adamw") and not _param(doc, "torch_adam"):
            rule = "DeepSpeed replaces it by DeepSpeedCPUAdam, because the step runs on the CPU"
            yield note("optimizer.type", f"optimizer {name} with offload", rule, "", _CLIENT)
        return
    if not doc.flag("zero_force_ds_cpu_optimizer"):
        rule = "any optimizer is taken, and a slow one is not noticed"
        yield note("zero_force_ds_cpu_optimizer", "zero_force_ds_cpu_optimizer=false", rule)
        return
    words = doc.facts.words
    is_client = "torch.optim" in words or "client provided optimizer" in words
    make = mistake if is_client else note
    if name:
        return
    yield make(
        "optimizer",
        "optimizer offload without an optimizer section",
        "an optimizer passed to deepspeed.initialize must be a DeepSpeedCPUAdam: DeepSpeed refuses torch.optim.AdamW "
        "here (ZeRORuntimeException)",
        "Add an optimizer section with type AdamW, pass DeepSpeedCPUAdam, or set zero_force_ds_cpu_optimizer to false.",
        _CLIENT,
    )


def _param(doc: Document, name: str) -> bool:
    params = doc.values.get("optimizer.params")
    return isinstance(params, dict) and params.get(name) is True


def _nvme(doc: Document, optimizer: str, param: str) -> Iterator[Finding]:
    for path, device in ((_OPTIMIZER, optimizer), (_PARAM, param)):
        if device != "nvme":
            if doc.has(f"{path}.nvme_path"):
                rule = "the path is used with device nvme only"
                yield note(f"{path}.nvme_path", f"nvme_path with device {device}", rule, "Drop it.")
            continue
        if not doc.has(f"{path}.nvme_path") and not doc.is_auto(f"{path}.nvme_path"):
            fact = f"{path.rpartition('.')[2]}.device=nvme without nvme_path"
            yield mistake(f"{path}.nvme_path", fact, "DeepSpeed must know the disk's folder", "Set nvme_path.")
        elif doc.text(f"{path}.nvme_path") == "/local_nvme":
            rule = "that is the path of the examples"
            yield note(f"{path}.nvme_path", "nvme_path=/local_nvme", rule, "Make sure that it is a local NVMe disk.")
    if optimizer == "nvme" and doc.stage in (1, 2):
        yield mistake(
            _OPTIMIZER,
            f"offload_optimizer.device=nvme with stage {doc.stage}",
            "stages 1 and 2 treat it as cpu: nothing goes to the disk",
            "Use stage 3, or device cpu.",
            "deepspeed/runtime/zero/stage_1_and_2.py",
        )
    if param == "nvme" and doc.stage == 3:
        yield from _buffers(doc)


def _buffers(doc: Document) -> Iterator[Finding]:
    size, model = doc.integer(f"{_PARAM}.buffer_size"), doc.facts.model
    if model is None or size is None:
        return
    ranks = data_parallel_ranks(doc) or 1
    largest = max(model.vocab_size * model.d_model, model.d_ff * model.d_model)
    part = -(-largest // ranks)
    if part > size:
        yield mistake(
            f"{_PARAM}.buffer_size",
            f"buffer_size={size:,} elements, and a rank's part of the largest parameter has {part:,}",
            "a parameter must fit into one buffer ('More elements ... than buffer size')",
            f"Use buffer_size={part:,}".replace(",", "") + " or more.",
            "deepspeed/runtime/swap_tensor/partitioned_param_swapper.py; DeepSpeed issue 3506",
        )


def _ratio(doc: Document, optimizer: str) -> Iterator[Finding]:
    ratio = doc.number(f"{_OPTIMIZER}.ratio")
    if ratio is None or ratio >= 1:
        return
    if doc.stage != 3:
        fact = f"offload_optimizer.ratio={ratio:g} with stage {doc.stage}"
        yield mistake(f"{_OPTIMIZER}.ratio", fact, "partial offload needs stage 3", "Use stage 3, or ratio 1.")
    elif optimizer == "nvme":
        yield mistake(
            f"{_OPTIMIZER}.ratio",
            f"offload_optimizer.ratio={ratio:g} with device nvme",
            "partial offload splits the state between GPU and CPU",
            "Use device cpu without nvme_path.",
            "DeepSpeed issue 4872",
        )


def state_bytes(num_parameters: int, stage: int, ranks: int) -> float:
    """Bytes on each rank for weights, gradients and Adam's state in mixed precision: 2 + 2 + 12 per parameter.

    Rajbhandari et al. 2020, arXiv 1910.02054, figure 1: stage 1 shards the 12, stage 2 also the gradients, stage 3 all.

    >>> [round(state_bytes(7_000_000_000, stage, 8) / 1e9, 1) for stage in range(4)]
    [112.0, 38.5, 26.2, 14.0]
    """
    whole = {0: 16, 1: 4, 2: 2, 3: 0}[stage]
    return num_parameters * (whole + (16 - whole) / ranks)


def _need(doc: Document, stage: int) -> Iterator[Finding]:
    """Offload costs time; whether memory asks for it is arithmetic."""
    model, ranks = doc.facts.model, data_parallel_ranks(doc)
    if model is None or ranks is None:
        return
    count = model.num_parameters
    each = (12 if doc.device("offload_optimizer") != "none" else 0) + (
        2 if doc.device("offload_param") != "none" else 0
    )
    yield note(
        _OPTIMIZER,
        f"offload of {count / 1e9:.1f} B parameters takes {each * count / 1e9:.0f} GB of host memory over all ranks",
        "12 bytes a parameter for float32 weights and Adam's moments, 2 for 16-bit parameters; pinned memory is not "
        "swapped out",
        "Where a process ends by signal 9, host memory is what is short.",
        "DeepSpeed issue 4571",
    )
    here, sharded = (state_bytes(count, one, ranks) / 1e9 for one in (stage, 3))
    if sharded > 60:
        return
    yield risk(
        _OPTIMIZER,
        f"without offload {count / 1e9:.1f} B parameters take {here:.1f} GB of state a GPU in stage {stage} "
        f"over {ranks} ranks" + ("" if stage == 3 else f", {sharded:.1f} GB in stage 3"),
        "offload moves the step to the CPU and gradients over PCIe, so it is for models that do not fit otherwise "
        "(activations come on top)",
        "Try without it on GPUs that have the room.",
        "16 bytes a parameter: arXiv 1910.02054, section 3",
    )
