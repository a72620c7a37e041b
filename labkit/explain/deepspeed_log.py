"""Logs of runs under DeepSpeed: batch, stage, offload, memory, and error messages."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from labkit.configuration import Finding, by_severity, check_messages, note, risk
from labkit.explain.verdict import Verdict
from labkit.spec import Model

__all__ = ["KIND", "looks", "read"]

KIND = "DeepSpeed log"
GIB = 1 << 30

_SIGNS = re.compile(
    r"MA \d+\.?\d* GB\s+Max_MA|DeepSpeed info: version|\[deepspeed\]|Stage \d initialize|DeepSpeedZeRoOffload|"
    r"DeepSpeed Final Optimizer|GradientAccumulationPlugin|deepspeed/runtime/|DeepSpeedZeroConfig|OVERFLOW! Rank"
)
_NUMBER = r"([\d,]+(?:\.\d+)?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """One report of `see_memory_usage`; its GB are GiB."""

    where: str
    device: float | None = None
    peak: float | None = None
    host: float | None = None


def looks(text: str) -> bool:
    """Whether a text has lines that DeepSpeed prints, or an error message of its own."""
    return bool(_SIGNS.search(text)) or any(True for _ in check_messages(text[:400_000]))


def read(text: str, *, model: Model | None, world_size: int | None) -> Verdict:
    """Explain a log."""
    reports = _memory(text)
    parameters = _find(text, rf"Number of trainable parameters\s*=\s*{_NUMBER}")
    count = int(parameters) if parameters else model.num_parameters if model else None
    findings = [
        *check_messages(text),
        *_accumulation(text),
        *_batch(text, world_size),
        *_offload(text, reports),
        *_whole_model(reports, count),
    ]
    stage = _stage(text)
    facts = [f"ZeRO stage {stage}" if stage is not None else ""]
    facts.append(f"{count:,} trainable parameters" if count else "")
    facts.append(f"{len(reports)} reports of memory" if reports else "")
    summary = ", ".join(one for one in facts if one)
    return Verdict(kind=KIND, summary=f"{summary}." if summary else "", findings=by_severity(findings))


def _find(text: str, pattern: str) -> float | None:
    match = re.search(pattern, text)
    return float(match[1].replace(",", "")) if match and len(match[1]) < 20 else None


def _stage(text: str) -> int | None:
    match = re.search(r"Stage (\d) initialize|ZeRO stage (\d)|zero_optimization_stage \.+ (\d)", text)
    return int(next(one for one in match.groups() if one)) if match else None


def _memory(text: str) -> list[_Memory]:
    """The reports in order: a line that says where, one of the device, one of the host."""
    found: list[_Memory] = []
    where = ""
    for line in text.splitlines():
        device = re.search(r"MA (\d+\.?\d*) GB\s+Max_MA (\d+\.?\d*) GB", line)
        host = re.search(r"CPU Virtual Memory:\s+used = (\d+\.?\d*) GB", line)
        if device:
            found.append(_Memory(where=where, device=float(device[1]), peak=float(device[2])))
        elif host and found and found[-1].where == where and found[-1].host is None:
            last = found.pop()
            found.append(_Memory(where=where, device=last.device, peak=last.peak, host=float(host[1])))
        elif host:
            found.append(_Memory(where=where, host=float(host[1])))
        elif line.strip():
            where = re.sub(r"^(\[[^\]]*\]\s*)+", "", line.strip())[:80]
    return found


def _accumulation(text: str) -> Iterator[Finding]:
    match = re.search(r"GradientAccumulationPlugin has (\d+), DeepSpeed config has (\d+)", text)
    if match:
        yield risk(
            "gradient_accumulation_steps",
            f"Accelerate's plugin says {match[1]} and the DeepSpeed file {match[2]}: {match[2]} is in force",
            "DeepSpeed's file counts, and a loop or a schedule that divides by the plugin's number is wrong",
            f"Set both to {match[2]}, or the file's to 'auto'.",
            "accelerate/accelerator.py",
        )


def _batch(text: str, world_size: int | None) -> Iterator[Finding]:
    micro = _find(text, rf"Instantaneous batch size per device\s*=\s*{_NUMBER}")
    total = _find(text, rf"Total train batch size \([^)]*\)\s*=\s*{_NUMBER}")
    steps = _find(text, rf"Gradient Accumulation steps\s*=\s*{_NUMBER}")
    if not micro or not total or not steps:
        return
    ranks = total / (micro * steps)
    fact = f"{total:g} = {micro:g} * {steps:g} * {ranks:g}"
    if world_size is not None and ranks != world_size:
        rule = f"the log's batch belongs to {ranks:g} data-parallel ranks, not {world_size}"
        yield risk("train_batch_size", fact, rule, "Compare how many ranks were started.")
    else:
        rule = f"samples of a step = micro-batch * accumulation * ranks, so {ranks:g} GPUs share the data"
        yield note("train_batch_size", fact, rule)


def _offload(text: str, reports: list[_Memory]) -> Iterator[Finding]:
    stage = _stage(text)
    hosts = [one.host for one in reports if one.host is not None]
    grown = f"; host memory went from {hosts[0]:g} to {max(hosts):g} GiB" if len(hosts) > 1 else ""
    after = next((one for one in reports if "DeepSpeedZeRoOffload initialize [end]" in one.where), None)
    parts = []
    if after is not None and after.device is not None and after.device < 0.1:
        parts.append("parameters")
    if "Adam Optimizer #" in text or "DeepSpeedCPUAdam" in text or "Detected ZeRO Offload" in text:
        parts.append("optimizer state")
    if parts:
        held = (
            f", and {after.device:g} GiB stay on the GPU after initialisation"
            if after and after.device is not None
            else ""
        )
        yield note(
            "zero_optimization",
            f"{'ZeRO' if stage is None else f'ZeRO stage {stage}'} with {' and '.join(parts)} on the CPU{held}{grown}",
            "the step runs on the CPU (DeepSpeedCPUAdam), and weights come over PCIe"
            if len(parts) == 2
            else "what is offloaded travels over PCIe each step",
        )


def _whole_model(reports: list[_Memory], count: int | None) -> Iterator[Finding]:
    """Before sharding, a model built without `zero.Init` stands whole on every GPU."""
    first = next((one for one in reports if one.device is not None), None)
    if first is None or not first.device or "Stage 3 initialize beginning" not in first.where or not count:
        return
    for name, each in (("16-bit", 2), ("float32", 4)):
        size = count * each / GIB
        if abs(first.device - size) <= 0.03 * size:
            yield risk(
                "zero_optimization.stage",
                f"before sharding each GPU holds {first.device:g} GiB = {count / 1e9:.2f} B parameters * {each} bytes "
                f"= {size:.2f} GiB: the whole {name} model",
                "the model was built without zero.Init, so every GPU must hold all of it once, whatever the stage",
                "Build it inside deepspeed.zero.Init; with Transformers, make TrainingArguments (or HfDeepSpeedConfig) "
                "before from_pretrained.",
                "deepspeed.readthedocs.io zero3",
            )
            return
