"""Predicted memory beside published tables: training state, activations, peaks.

Rows that no formula here is for are left out of a score, and its count says so: adapters, weights of 4 bits, optimizers
of other sizes, and rows that do not say what they ran.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks import published_stacks as stacks
from benchmarks.published_models import gpt, llama, shape
from benchmarks.published_row import TABLES, Row, constant_pct, error_pct, is_measurement, read, tried
from labkit.predict.megatron import bytes_per_parameter, chunks_in_flight, layer_bytes, layers_state_bytes
from labkit.spec import Layout, Model

Fields = dict[str, str]
Pair = tuple[float, float]
"""Predicted and measured, in one unit."""

STATE, ACTIVATIONS, PEAK = "training state", "activations", "peak memory"
LARGEST, LARGEST_MEASURED = "largest model, by formula", "largest model, measured"
MEASURED_USABLE = 0.74
"""What activations and the rest left for training state on ZeRO's V100s: calibrated on its table 2."""
SHAPES = {
    "qwen3-8b": llama(36, 4096, 32, 12_288, 151_936),
    "internlm-7b": llama(32, 4096, 32, 11_008, 103_168, num_kv_heads=32),
    "internlm-20b": llama(60, 5120, 40, 13_824, 103_168, num_kv_heads=40),
}
"""Shapes from the models' own configurations, beside those of `published_models`."""


def score(tables_dir: Path = TABLES) -> list[Row]:
    """Score every memory table of a folder; a table that is not there has no row."""
    found: list[Row] = []
    for table, target, pairs in _all_pairs(tables_dir):
        known = [pair for pair in pairs if pair is not None]
        if known:
            predicted, measured = zip(*known, strict=True)
            found.append(Row(table, target, error_pct(predicted, measured), constant_pct(measured), len(known)))
    return found


def _all_pairs(tables_dir: Path) -> Iterator[tuple[str, str, list[Pair | None]]]:
    """Table, what is predicted, and pairs; None for a row that has no formula."""
    rows = read(tables_dir, "zero_table1_state_memory")
    yield "zero_table1_state_memory", STATE, [_tried(_state, row) for row in rows]
    rows = read(tables_dir, "zero_table2_max_model")
    for target, kind, usable in ((LARGEST, "theoretical", 1.0), (LARGEST_MEASURED, "measured", MEASURED_USABLE)):
        of_kind = [row for row in rows if kind in row.get("kind", "")]
        yield "zero_table2_max_model", target, [_tried(_largest, row, usable) for row in of_kind]
    rows = read(tables_dir, "korthikanti_activation_memory")
    yield from _components("korthikanti_activation_memory", rows)
    for table, column in PEAKS.items():
        rows = [row | {"from_table": table} for row in read(tables_dir, table) if _is_measured(row, column)]
        yield table, PEAK, [_tried(_peak, row, column) for row in rows]
    rows = [row for row in read(tables_dir, "memory_measured") if _is_measured(row, "peak_mem")]
    peaks = [row for row in rows if "component" not in row.get("mem_kind", "")]
    yield "memory_measured", PEAK, [_tried(_peak, row, "peak_mem") for row in peaks]
    for stack in ("torchao", "InternEvo"):
        own = [row for row in peaks if _stack(row) == stack]
        yield "memory_measured", f"{PEAK}, {stack}", [_tried(_peak, row, "peak_mem") for row in own]
    yield from _components(
        "memory_measured", [_component(row) for row in rows if "component" in row.get("mem_kind", "")]
    )


def _components(table: str, rows: list[Fields]) -> Iterator[tuple[str, str, list[Pair | None]]]:
    for target, is_state in ((STATE, True), (ACTIVATIONS, False)):
        own = [row for row in rows if row.get("item", "").startswith("parameters") == is_state]
        yield table, target, [_tried(_korthikanti, row) for row in own]


def _tried(predict: Callable[..., Pair | None], row: Fields, *others: object) -> Pair | None:
    """What a formula gives for a row, and what was measured, where both are numbers."""
    pair = tried(predict, row, *others)
    return pair if pair is not None and math.isfinite(pair[0]) and is_measurement(pair[1]) else None


PEAKS = {
    "zero_bubble_throughput_memory": "peak_mem_gb",
    "throughput_memory_bigscience_bloom": "mem_gb",
    "throughput_memory_bigscience_1b3_v100": "mem_gb",
    "throughput_memory_nanotron_playbook": "mem_gb",
    "throughput_memory_torchtitan": "mem_gib",
}
"""Table -> the column of measured peaks."""


def _state(row: Fields) -> Pair:
    """ZeRO's table 1: bytes of one parameter, times parameters in billions."""
    match = re.match(r"([\d.]+)\s*([BT])", row["model"])
    billions = float(match[1]) * (1000 if match[2] == "T" else 1)  # type: ignore[index]
    layout = Layout(dp=int(row["dp"]), zero_stage=_stage(row["stage"]))
    return billions * bytes_per_parameter(layout), float(row["model_state_gb_per_device"])


def _stage(text: str) -> int:
    return text.split("(")[0].count("+") + 1 if text.startswith("P_os") else 0


def _largest(row: Fields, usable: float) -> Pair:
    """ZeRO's table 2: the largest model whose state fits 32 GB, or what of it is left."""
    mp = int(row["mp"])
    layout = Layout(dp=int(row["gpus"]) // mp, zero_stage=_stage(row["stage"]))
    return mp * 32 * usable / bytes_per_parameter(layout), float(row["value"])


def _korthikanti(row: Fields) -> Pair | None:
    """Figures 1 and 7: the first stage in GiB, or one micro-batch of a layer in percent of tensor parallelism's."""
    layers = int(row["layers"])
    model = gpt(layers, int(row["hidden"]), int(row["heads"]), 2048)
    t, p, v, b = (int(row[name]) for name in ("tp", "pp", "vpp", "mbs"))
    item, value = row["item"], float(row["value"])
    if item.startswith("parameters"):
        return layers_state_bytes(model, Layout(tp=t), -(-layers // p), gradients=4) / stacks.GIB, value
    sequence = "sequence" in item
    recompute = "selective" if "selective" in item else "full" if "full" in item else "none"
    layout = Layout(tp=t, microbatch_size=b, sequence_parallel=sequence, recompute=recompute)
    each = layer_bytes(model, layout)
    if row["unit"].startswith("%"):
        return 100 * each / layer_bytes(model, Layout(tp=t, microbatch_size=b)), value
    chunks = chunks_in_flight("interleaved", p, 0, 8 * p, v)
    return each * layers / (p * v) * chunks / stacks.GIB, value


def _component(row: Fields) -> Fields:
    """A row of `memory_measured` in the columns of `korthikanti_activation_memory`."""
    vpp = re.search(r"x(\d+)", row.get("schedule", ""))
    return row | {
        "item": row.get("recompute", ""),
        "value": row["peak_mem"],
        "unit": row.get("mem_unit", ""),
        "vpp": vpp[1] if vpp else "1",
    }


def _is_measured(row: Fields, column: str) -> bool:
    return bool(row.get(column)) and row.get("oom", "") != "True"


def _stack(row: Fields) -> str | None:
    """The stack that a row was measured with."""
    text = f"{row.get('from_table', '')} {row.get('source', '')}"
    return next((name for mark, name in STACKS.items() if mark in text), None)


def _peak(row: Fields, column: str) -> Pair | None:
    """Predicted and measured peak of a row; None where no stack here is the row's."""
    stack = _stack(row)
    counted = PREDICTORS[stack](row) if stack is not None else None
    if stack is None or counted is None:
        return None
    unit = stacks.GIB if "gib" in column or row.get("mem_unit") == "GiB" else stacks.GB
    device = _device(row.get("gpu") or "")
    return (counted + stacks.CALIBRATED.get((stack, device), 0.0)) / unit, float(row[column])


STACKS = {
    "zero_bubble": "zero bubble",
    "bigscience": "Megatron-DeepSpeed",
    "nanotron": "nanotron",
    "torchtitan": "torchtitan",
    "pytorch/ao": "torchao",
    "InternEvo": "InternEvo",
}
"""What a row's table or source contains -> the stack that it was measured with."""


def _device(name: str) -> str:
    if "SM100" in name:
        return "B200"
    match = re.search(r"[ABHV]\d{3}", name)
    return match[0] if match else name


def _whole(row: Fields, *names: str, default: int | None = None) -> int:
    """The first of these columns that has a number."""
    text = next((row[name] for name in names if row.get(name)), "")
    match = re.match(r"\d+", text)
    if match is None and (text or default is None):
        raise ValueError(f"{names[0]} has no number")
    return int(match[0]) if match else default  # type: ignore[return-value]


def _layout(row: Fields, **changes: object) -> Layout:
    mbs, pp, dp = (
        _whole(row, "mbs", "local_batch"),
        _whole(row, "pp", default=1),
        _whole(row, "dp", "dp_shard", default=1),
    )
    chosen = _whole(row, "microbatches", "grad_accum", default=0)
    if not chosen and (gbs := _whole(row, "gbs", "gbs_sequences", default=0)):
        chosen = max(1, gbs // (mbs * dp))
    fields: dict[str, object] = {
        "dp": dp,
        "tp": _whole(row, "tp", default=1),
        "pp": pp,
        "zero_stage": _whole(row, "zero_stage", default=0),
        "microbatch_size": mbs,
        "num_microbatches": chosen or 8 * pp,
    }
    return Layout(**(fields | changes))  # type: ignore[arg-type]


def _named(row: Fields) -> Model | None:
    """The dense model that a row names, at its sequence length."""
    name = row["model"].lower()
    known = SHAPES.get(name)
    if known is None and name.startswith("llama") and (found := shape(name)) is not None and not found.visited:
        known = found.model
    return replace(known, seq_len=_whole(row, "seq")) if known else None


def _recompute(row: Fields) -> str:
    text = row.get("recompute", "").lower()
    return (
        "full"
        if text.startswith(("full", "true"))
        else "selective"
        if "select" in text or text == "not stated"
        else "none"
    )


def _bloom(row: Fields) -> float:
    if "1b3" in row["from_table"]:
        layout = _layout(row, zero_stage=1, recompute=_recompute(row))
        small = gpt(24, 2048, 16, 2048, 50_304)
        return stacks.megatron_deepspeed(small, layout, fp32_gradients=False, balanced=False)
    h, vocab = _whole(row, "hidden"), 250_880
    size = float(row.get("size_b") or row["params_b"]) * 1e9
    layers = _whole(row, "layers", default=round((size - vocab * h) / (12 * h * h)))
    heads = _whole(row, "heads", default=h // 120 if h % 120 == 0 else h // 128)
    numerics = row.get("numerics") or row["precision"]
    layout = _layout(row, recompute="full")
    return stacks.megatron_deepspeed(
        gpt(layers, h, heads, 2048, vocab),
        layout,
        fp32_gradients=numerics.startswith("bf16"),
        balanced="balanced" in numerics,
    )


def _zero_bubble(row: Fields) -> float | None:
    schedules = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb1p", "ZB-2p": "zb2p"}
    if row["schedule"] not in schedules:
        return None
    model = gpt(*(_whole(row, name) for name in ("layers", "hidden", "heads", "seq")), 50_304)
    return stacks.zero_bubble(model, _layout(row), schedules[row["schedule"]])


def _nanotron(row: Fields) -> float | None:
    """Llama-like shapes: where a row has no feed-forward width, the one that gives its parameters, tied or not."""
    h, layers, params = _whole(row, "hidden"), _whole(row, "layers"), float(row["params_b"]) * 1e9
    vocab = _whole(row, "vocab", default=131_072)
    widths = [_whole(row, "ffn")] if row.get("ffn") else [f for f in (8 * h // 3, 7 * h // 2, 4 * h) if f % 256 == 0]

    def size(choice: tuple[int, bool]) -> float:
        return layers * (4 * h * h + 3 * h * choice[0]) + (1 if choice[1] else 2) * vocab * h

    width, tied = min(((f, tied) for f in widths for tied in (True, False)), key=lambda one: abs(size(one) - params))
    heads = _whole(row, "heads")
    model = replace(
        llama(layers, h, heads, width, vocab, num_kv_heads=heads), seq_len=_whole(row, "seq"), tied_embeddings=tied
    )
    layout = _layout(row)
    return stacks.nanotron(model, _layout(row, sequence_parallel=layout.tp > 1))


def _fsdp2(row: Fields) -> float | None:
    model = _named(row)
    if model is None or "NVFP4" in (row.get("technique") or row.get("schedule", "")) + row.get("precision", ""):
        return None  # 4 bits: no layout here has them
    layout = _layout(row, zero_stage=3, recompute=_recompute(row))
    if layout.pp > 1:  # the samples of a rank are its micro-batches
        layout = _layout(row, zero_stage=3, recompute=_recompute(row), microbatch_size=1,
                         num_microbatches=layout.microbatch_size)  # fmt: skip
    is_later = _device(row["gpu"]) in ("H200", "B200")  # measured with software of 2025, whose compiled loss is fused
    return stacks.fsdp2(model, layout, context_parallel=_whole(row, "cp", default=1), fused_loss=is_later)


def _internevo(row: Fields) -> float | None:
    model = _named(row)
    return stacks.internevo(model, _layout(row, recompute="full")) if model else None


PREDICTORS: dict[str, Callable[[Fields], float | None]] = {
    "zero bubble": _zero_bubble,
    "Megatron-DeepSpeed": _bloom,
    "nanotron": _nanotron,
    "torchtitan": _fsdp2,
    "torchao": _fsdp2,
    "InternEvo": _internevo,
}


BARS = (
    {(table, STATE): 2.0 for table in ("zero_table1_state_memory", "korthikanti_activation_memory", "memory_measured")}
    | {(table, ACTIVATIONS): 10.0 for table in ("korthikanti_activation_memory", "memory_measured")}
    | {(table, PEAK): 15.0 for table in (*PEAKS, "memory_measured")}
    | {("zero_table2_max_model", LARGEST): 2.0}
)
"""Table and target -> the largest error in percent that counts as met."""
