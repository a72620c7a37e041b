"""Rows of published throughput tables as cases: what is printed, and what the source says of its machines."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.published_case import Case
from benchmarks.published_models import SHAPES, Shape, gpt, shape
from benchmarks.published_row import read, tried
from labkit.predict import Reach, Software, collective_time
from labkit.predict.costs import Work
from labkit.spec import Hardware, Model

OLD, NEW = Software.preset("megatron-2021"), Software.preset("megatron")
FSDP = replace(NEW, dp_hidden=0.9, gradient_bytes=2)
A100, H100 = Hardware.preset("a100-80"), Hardware.preset("h100")
SELENE = A100  # a 200 Gb/s port for each device
VTRAIN = Hardware.preset("a100-80", network="roce-100")  # four 200 Gb/s ports for eight devices
JEAN_ZAY = replace(A100, network_bytes_per_s=6.25e9)  # four 100 Gb/s ports for eight devices
NVFP4 = {"fp8_flops": 10_000e12}
DEVICES = {
    "A100": A100,
    "H100": H100,
    "H200": Hardware.preset("h200"),
    "B200": Hardware.preset("b200"),
    "GB200": Hardware.preset("gb200"),
    "GB200 (NVFP4)": replace(Hardware.preset("gb200"), **NVFP4),
}
OTHERS = {
    "TPU v5p": {"bf16_flops": 459e12, "memory_bytes_per_s": 2.765e12},
    "TPU v5e": {"bf16_flops": 197e12, "memory_bytes_per_s": 0.819e12},
    "TPU Trillium": {"bf16_flops": 918e12, "memory_bytes_per_s": 1.64e12},
    "Gaudi2": {"bf16_flops": 432e12, "memory_bytes_per_s": 2.45e12},
}
"""Accelerators whose runs do not say how they were laid out: their makers' data sheets."""
BLOOM_VOCABULARY = 250_880
BLOOM_HEADS = 64
"""Of the rows that print none: most of the others have as many."""

PACKED = 512
"""Tokens of a sample in fine-tuning, of which many are packed into a sequence and attend to themselves alone."""

UNKNOWN = ("", "NA")

Row = dict[str, str]


def number(text: str, otherwise: int = 1) -> int:
    """A whole number as tables print it; empty and NA are `otherwise`.

    Raises:
        ValueError: something else.

    >>> number("8"), number("NA", 0)
    (8, 0)
    """
    text = text.strip()
    return otherwise if text in UNKNOWN else int(float(text))


def vtrain(row: Row) -> Case | None:
    """Megatron-DeepSpeed on A100 nodes, everything recomputed."""
    dp, mbs = number(row["dp"]), number(row["mbs"])
    return Case(
        stack=(row["gpu"], "Megatron-DeepSpeed, vTrain"),
        step_s=float(row["iter_ms"]) / 1e3,
        hardware=VTRAIN,
        software=OLD,
        model=gpt(number(row["layers"]), number(row["hidden"]), number(row["heads"]), number(row["seq"])),
        num_microbatches=number(row["gbs"]) // (dp * mbs),
        microbatch_size=mbs,
        dp=dp,
        tp=number(row["tp"]),
        pp=number(row["pp"]),
        recompute="full",
    )


def bloom(row: Row) -> Case | None:
    """BLOOM's log: Megatron-DeepSpeed, ZeRO-1, everything recomputed; before and after a fix of the nodes."""
    if not row["sec_per_it"]:
        return None
    h, pp = number(row["hidden"]), number(row["pp"])
    by_size = round((float(row["size_b"]) * 1e9 / h - BLOOM_VOCABULARY) / (12 * h) / pp) * pp
    dp, mbs = number(row["dp"]), number(row["mbs"])
    return Case(
        stack=("A100-80GB", "Megatron-DeepSpeed", row["cluster_state"][:6]),
        step_s=float(row["sec_per_it"]),
        hardware=JEAN_ZAY,
        software=OLD,
        model=gpt(number(row["layers"], by_size), h, number(row["heads"], BLOOM_HEADS), 2048, BLOOM_VOCABULARY),
        num_microbatches=number(row["gbs"]) // (dp * mbs),
        microbatch_size=mbs,
        dp=dp,
        tp=number(row["tp"]),
        pp=pp,
        recompute="full",
        zero_stage=number(row["zero_stage"], 0),
    )


def mlperf(row: Row) -> Case | None:
    """MLPerf Training; where a log does not say how a run was laid out, its samples are spread over everyone."""
    model = SHAPES["405b" if "405b" in row["benchmark"] else "175b"].model
    if row["gpu"] in OTHERS:
        return _spread(row, replace(model, seq_len=number(row["seq"])))
    hardware = DEVICES.get(row["gpu"])
    if not row["tp"] or hardware is None:
        return None
    dp, mbs, pp = number(row["dp"]), number(row["mbs"]), number(row["pp"])
    return Case(
        stack=(row["gpu"], "MLPerf", row["round"]),
        step_s=float(row["step_s"]),
        hardware=hardware,
        software=NEW,
        model=replace(model, seq_len=number(row["seq"])),
        num_microbatches=max(1, number(row["gbs"]) // (dp * mbs)),
        microbatch_size=mbs,
        dp=dp,
        tp=number(row["tp"]),
        pp=pp,
        cp=number(row["cp"]),
        num_virtual_stages=number(row["vpp"], max(1, model.num_layers // pp // 2)),
        precision="fp8",
        sequence_parallel=True,
        zero_stage=1,
    )


def _spread(row: Row, model: Model) -> Case:
    return Case(
        stack=(row["gpu"], "MLPerf", row["round"]),
        step_s=float(row["step_s"]),
        hardware=replace(H100, name=row["gpu"], **OTHERS[row["gpu"]]),
        software=NEW,
        model=model,
        num_microbatches=1,
        microbatch_size=number(row["gbs"]) / number(row["accelerators"]),
        dp=number(row["accelerators"]),
        zero_stage=1,
    )


def cloud(row: Row) -> Case | None:
    """NVIDIA's DGX Cloud recipes."""
    found, hardware = shape(row["model"]), DEVICES.get(row["gpu"])
    if found is None or hardware is None or not row["step_s"]:
        return None
    tp, pp, cp, mbs = (number(row[key]) for key in ("tp", "pp", "cp", "mbs"))
    is_jax, adapters = "MaxText" in row["framework"], row["task"] == "LoRA"
    dp = number(row["gpus"]) // (tp * pp * cp)
    printed = found.model.num_layers if found.hybrid else number(row["layers"], found.model.num_layers)
    seq = number(row["seq"])
    samples = 1 if row["task"] == "pretrain" else seq // PACKED
    model = replace(found.model, seq_len=seq // samples, num_layers=printed)
    extra, extra_s = routed(found, model, mbs * seq / cp, tp, number(row["ep"]), hardware)
    return Case(
        stack=(row["gpu"], row["framework"], row["release"][:7]),
        step_s=float(row["step_s"]),
        hardware=hardware,
        software=FSDP if is_jax else NEW,
        model=model,
        num_microbatches=max(1, round(number(row["gbs"]) / (dp * mbs))),
        microbatch_size=mbs * samples,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        num_virtual_stages=number(row["vpp"]),
        precision=row["precision"].lower(),
        recompute="full" if is_jax else "none",
        sequence_parallel=tp > 1,
        zero_stage=3 if is_jax else 1,
        trains=0.0 if adapters else 1.0,
        extra=extra,
        extra_s=extra_s,
    )


def routed(found: Shape, model: Model, tokens: float, tp: int, ep: int, hardware: Hardware) -> tuple[Work, float]:
    """What routing adds to a layer: tokens put in order and back, and sent to their experts and back."""
    if not found.visited:
        return Work(), 0.0
    copies = found.visited * tokens * model.d_model / tp
    moved = Work(num_bytes=4 * 4 * copies, num_kernels=12)
    group = Reach(ep, -(-ep * tp // hardware.ranks_per_host))
    return moved, 2 * collective_time("all_to_all", 2 * copies, group, hardware)


def cases(tables_dir: Path, table: str, make: Callable[[Row], Case | None]) -> list[tuple[Row, Case]]:
    """The rows of a table that say enough, with their cases; a row whose numbers are missing says too little."""
    tried_rows = [(row, tried(make, row)) for row in read(tables_dir, table)]
    return [(row, case) for row, case in tried_rows if case is not None]
