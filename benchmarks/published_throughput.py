"""Rows of further published throughput tables as cases: papers, release notes and training logs."""

from dataclasses import replace

from benchmarks.published_case import Case
from benchmarks.published_models import SHAPES, gpt, llama, shape
from benchmarks.published_pipelines import MODELS, bubble_rate
from benchmarks.published_runs import A100, DEVICES, FSDP, H100, NEW, NVFP4, OLD, PACKED, SELENE, Row, number, routed
from labkit.predict import Software
from labkit.spec import Hardware

ROCE = replace(A100, network_bytes_per_s=6.25e9)  # four 100 Gb/s ports for eight devices
NANOTRON = Software(stream_bytes=2, kernel_s=10e-6, call_s=100e-6)
INTERNEVO = Software(stream_bytes=2, gradient_bytes=2, dp_hidden=0.5, kernel_s=10e-6)
MOSAIC = {
    "h100_80gb": H100,
    "a100_80gb": A100,
    "a100_40gb": Hardware.preset("a100-40"),
}
MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (64, 8192, 64),
}
"""Layers, width and heads of MosaicML's models, from llm-foundry's configurations."""
GB300 = replace(Hardware.preset("gb200"), name="gb300", memory_bytes=278 * 10**9)
SYSTEMS = {
    "DGX-H100": H100,
    "DGX-B200": DEVICES["B200"],
    "DGX-B300": DEVICES["B200"],
    "DGX-GB200": DEVICES["GB200"],
    "DGX-GB300": GB300,
}
FOUR_BITS = {"DGX-GB200": NVFP4, "DGX-GB300": {"fp8_flops": 15_000e12}, "DGX-B200": {"fp8_flops": 9_000e12}}


def per_device(tokens: float, row: Row, gpus: int) -> float:
    """Seconds of a step of so many tokens, from tokens a second of each device."""
    return tokens / (float(row["tokens_per_s_per_gpu"]) * gpus)


def narayanan(row: Row) -> Case | None:
    """SC21, table 1: weak scaling on A100, everything recomputed."""
    return Case(
        stack=("A100", "Megatron-LM, 2021"),
        step_s=float(row["derived_step_s"]),
        hardware=SELENE,
        software=OLD,
        model=gpt(*(number(row[key]) for key in ("layers", "hidden", "heads", "seq", "vocab"))),
        num_microbatches=number(row["microbatches"]),
        microbatch_size=number(row["mbs"]),
        dp=number(row["dp"]),
        tp=number(row["tp"]),
        pp=number(row["pp"]),
        num_virtual_stages=number(row["vpp"]),
        recompute="full",
    )


def korthikanti(row: Row) -> Case | None:
    """Korthikanti et al. 2022, table 5: full recomputation, or selective with sequence parallelism."""
    is_full = row["mode"].startswith("full")
    return Case(
        stack=("A100", "Megatron-LM, 2022"),
        step_s=float(row["iter_s"]),
        hardware=SELENE,
        software=OLD,
        model=gpt(*(number(row[key]) for key in ("layers", "hidden", "heads", "seq"))),
        num_microbatches=number(row["gbs"]) // (number(row["dp"]) * number(row["mbs"])),
        microbatch_size=number(row["mbs"]),
        dp=number(row["dp"]),
        tp=number(row["tp"]),
        pp=number(row["pp"]),
        num_virtual_stages=number(row["vpp"]),
        recompute="full" if is_full else "selective",
        sequence_parallel=not is_full,
    )


def megascale(row: Row) -> Case | None:
    """MegaScale, table 2: two programs, strong scaling."""
    return Case(
        stack=("A100", row["system"]),
        step_s=float(row["iter_s"]),
        hardware=SELENE,
        software=NEW,
        model=gpt(*(number(row[key]) for key in ("layers", "hidden", "heads", "seq", "vocab"))),
        num_microbatches=number(row["gbs"]) // number(row["dp"]),
        dp=number(row["dp"]),
        tp=number(row["tp"]),
        pp=number(row["pp"]),
        num_virtual_stages=number(row["vpp"]),
        sequence_parallel=True,
        zero_stage=1,
    )


def megatron_h100(row: Row) -> Case | None:
    """Megatron-LM's README: micro-batches and virtual stages are not printed, one sample and two layers are taken."""
    pp = number(row["pp"])
    model = gpt(*(number(row[key]) for key in ("layers", "hidden", "heads", "seq", "vocab")))
    tokens = number(row["gbs"]) * model.seq_len
    return Case(
        stack=("H100", "Megatron-LM, 2024"),
        step_s=tokens * model.flops_per_token / (float(row["tflops_per_gpu"]) * 1e12 * number(row["gpus"])),
        hardware=H100,
        software=NEW,
        model=model,
        num_microbatches=number(row["gbs"]) // number(row["dp"]),
        dp=number(row["dp"]),
        tp=number(row["tp"]),
        pp=pp,
        num_virtual_stages=max(1, model.num_layers // pp // 2),
        sequence_parallel=number(row["tp"]) > 1,
        zero_stage=1,
    )


def zero_bubble(row: Row) -> Case | None:
    """Qi et al. 2023, table 4: samples a second of four schedules."""
    if row["model"] not in MODELS:
        return None
    m, mbs, pp = number(row["microbatches"]), number(row["mbs"]), number(row["pp"])
    return Case(
        stack=("A100", "zero-bubble"),
        step_s=m * mbs * number(row["dp"]) / (float(row["samples_per_gpu_per_s"]) * number(row["gpus"])),
        hardware=A100,
        software=OLD,
        model=gpt(*(number(row[key]) for key in ("layers", "hidden", "heads", "seq"))),
        num_microbatches=m,
        microbatch_size=mbs,
        pp=pp,
        idle=bubble_rate(row["schedule"], row["model"], pp, m),
    )


def foundry(row: Row) -> Case | None:
    """MosaicML's llm-foundry: fully sharded data parallelism."""
    size, hardware = row["model"].removeprefix("MPT-").lower(), MOSAIC.get(row["gpu"])
    if size not in MPT or hardware is None or row["cpu_offload"] == "True":
        return None
    gpus, seq = number(row["gpus"]), number(row["seq"])
    is_eight = "fp8" in row["precision"]
    return Case(
        stack=(row["gpu"], "llm-foundry", row["precision"]),
        step_s=float(row["derived_step_s"]),
        hardware=hardware,
        software=replace(FSDP, skips_masked=False),  # biased attention, which takes as long as if nothing were masked
        model=gpt(*MPT[size], seq, 50_368),
        num_microbatches=number(row["grad_accum"]),
        microbatch_size=number(row["mbs"]),
        dp=gpus,
        precision="fp8" if is_eight else "bf16",
        recompute="full" if row["recompute"] == "True" else "none",
        zero_stage=3 if row["sharding"] == "FULL_SHARD" else 2,
    )


def nemo(row: Row) -> Case | None:
    """NVIDIA's performance summaries of NeMo and Megatron-Bridge: the models whose shapes are listed."""
    found, hardware = shape(row["model"]), SYSTEMS.get(row["system"])
    if found is None or hardware is None:
        return None
    tp, pp, cp, mbs, gpus = (number(row[key]) for key in ("tp", "pp", "cp", "mbs", "gpus"))
    seq = number(row["seq"])
    dp = gpus // (tp * pp * cp)
    if row["precision"] == "NVFP4":
        hardware = replace(hardware, **FOUR_BITS.get(row["system"], {}))
    samples = 1 if row["task"] == "Pre-Training" else seq // PACKED
    model = replace(found.model, seq_len=seq // samples)
    extra, extra_s = routed(found, model, mbs * seq / cp, tp, number(row["ep"]), hardware)
    return Case(
        stack=(row["system"], "four bits" if row["precision"] == "NVFP4" else "NeMo", row["release"]),
        step_s=per_device(number(row["gbs"]) * seq, row, gpus),
        hardware=hardware,
        software=NEW,
        model=model,
        num_microbatches=max(1, number(row["gbs"]) // (dp * mbs)),
        microbatch_size=mbs * samples,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        num_virtual_stages=number(row["vpp"]),
        precision="bf16" if row["precision"] in ("BF16", "") else "fp8",
        sequence_parallel=tp > 1,
        zero_stage=3 if number(row["fsdp"], 0) > 1 else 1,
        trains=0.0 if row["task"] == "LoRA" else 1.0,
        extra=extra,
        extra_s=extra_s,
    )


def nanotron(row: Row) -> Case | None:
    """The Ultra-Scale Playbook's best layouts on H100."""
    layers, width, heads, ff, vocab = (number(row[key]) for key in ("layers", "hidden", "heads", "ffn", "vocab"))
    model = llama(layers, width, heads, ff, vocab, num_kv_heads=heads)
    flops = number(row["tokens_per_step"]) * model.flops_per_token
    return Case(
        stack=("H100", "nanotron"),
        step_s=flops / (float(row["mfu_pct"]) / 100 * H100.bf16_flops * number(row["gpus"])),
        hardware=H100,
        software=NANOTRON,
        model=model,
        num_microbatches=number(row["grad_accum"]),
        microbatch_size=number(row["mbs"]),
        dp=number(row["dp"]),
        tp=number(row["tp"]),
        pp=number(row["pp"]),
        sequence_parallel=True,
        zero_stage=number(row["zero_stage"], 0),
    )


def internevo(row: Row) -> Case | None:
    """InternEvo, 7 billion parameters: optimizer states sharded over everyone, or within a node."""
    gpus, tp, mbs, m = (number(row[key]) for key in ("gpus", "tp", "mbs", "micro_num"))
    dp, shards = gpus // tp, max(0, number(row["zero1"], 0))  # -1 is everyone
    model = replace(SHAPES["llama2-7b"].model, seq_len=number(row["seq"]), vocab_size=103_168)
    return Case(
        stack=("A100", "InternEvo"),
        step_s=per_device(dp * mbs * m * model.seq_len, row, gpus),
        hardware=ROCE,
        software=INTERNEVO,
        model=model,
        num_microbatches=m,
        microbatch_size=mbs,
        dp=dp,
        tp=tp,
        recompute="full" if row["recompute"] == "True" else "none",
        sequence_parallel=tp > 1,
        zero_stage=1,
        shards=min(shards, dp),
    )
