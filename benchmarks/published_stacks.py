"""What a rank holds at its peak under the software that published tables were measured with, in bytes.

Each stack is the formulas of `labkit.predict.megatron` with what its own source says about it: bytes of training state,
what is kept for the backward, what else is there. One constant for each stack and device is calibrated: `CALIBRATED`.
"""

from labkit.predict.megatron import bytes_per_parameter, chunks_in_flight, layer_bytes
from labkit.spec import Layout, Model

GB, GIB = 10**9, 2**30

CALIBRATED: dict[tuple[str, str], float] = {
    ("Megatron-DeepSpeed", "A100"): 9.0 * GB,
    ("Megatron-DeepSpeed", "V100"): 2.7 * GB,
    ("zero bubble", "A100"): 0.0,
    ("nanotron", "H100"): 2.8 * GB,
    ("torchtitan", "H100"): 7.4 * GIB,
    ("torchtitan", "H200"): 0.0 * GIB,
    ("torchtitan", "B200"): 0.0 * GIB,
    ("torchao", "H100"): -2.8 * GIB,
    ("torchao", "B200"): -8.4 * GIB,
    ("InternEvo", "A800"): 19.0 * GB,
}
"""Bytes that a stack takes beside what is counted: context, communication buffers, fragments, and what it does better.

Medians of measured minus counted over the rows of each stack.
"""

LOGIT_BYTES = 10
"""16-bit logits, then in fp32 their copy and its gradient: where the loss is not computed in parts or fused."""


def matrix_elements(model: Model) -> int:
    """Elements of a layer's matrices."""
    kv_width = model.num_kv_heads * model.head_dim
    feed_forward = (3 if model.activation == "swiglu" else 2) * model.d_ff
    return model.d_model * (2 * model.d_model + 2 * kv_width + feed_forward)


def megatron_deepspeed(model: Model, layout: Layout, *, fp32_gradients: bool, balanced: bool) -> float:
    """Megatron-DeepSpeed with ZeRO 0 or 1: 1F1B, 16-bit weights, fp32 copies and moments.

    Args:
        model: its shape.
        layout: its layout.
        fp32_gradients: whether gradients are added up in fp32, unsharded (its bf16 optimizer), and not in fp16.
        balanced: whether the embedding and the head count as layers when stages are cut.
    """
    each = bytes_per_parameter(layout, gradients=6 if fp32_gradients else 2)
    if not fp32_gradients:  # the optimizer's own copy of the gradients it updates from
        each += 4 / (layout.dp if layout.zero_stage else 1)
    recomputes = layout.recompute == "full"
    whole = layer_bytes(model, _kept(layout))
    kept = layer_bytes(model, layout)
    tokens = model.seq_len * layout.microbatch_size
    most = 0.0
    for stage in range(layout.pp):
        num_layers = _layers(model, layout, stage, balanced=balanced)
        ends = (stage == 0) + (stage == layout.pp - 1 and layout.pp > 1)
        elements = num_layers * matrix_elements(model) / layout.tp
        elements += ends * model.vocab_size * model.d_model / layout.tp
        held = kept * num_layers * chunks_in_flight("1f1b", layout.pp, stage, layout.num_microbatches)
        is_last = stage == layout.pp - 1
        logits = LOGIT_BYTES * tokens * model.vocab_size / layout.tp if is_last else 0
        most = max(most, elements * each + held + (whole if recomputes else 0) + logits)
    return most


def zero_bubble(model: Model, layout: Layout, schedule: str) -> float:
    """Megatron-LM with the zero-bubble schedules: fp16, no recomputation, the two ends count as a layer each."""
    p = layout.pp
    num_layers = -(-(model.num_layers + 2) // p)
    v = num_layers if schedule == "interleaved" else 1  # one layer in each of the smaller stages
    most = 0.0
    for stage in range(p):
        own = num_layers - (stage in (0, p - 1))
        elements = own * matrix_elements(model) + (stage in (0, p - 1)) * model.vocab_size * model.d_model
        chunks = chunks_in_flight(schedule, p, stage, layout.num_microbatches, v) / v
        held = own * chunks * layer_bytes(model, layout)
        most = max(most, elements / layout.tp * bytes_per_parameter(layout) + held)
    return most


def nanotron(model: Model, layout: Layout) -> float:
    """nanotron: bf16 weights, gradients added up in fp32, 1F1B, sequence parallelism within tp, flash attention.

    Rotations in fp32 and unfused norms keep 14 bytes more for each entry of the stream than Megatron's layer.
    """
    each = bytes_per_parameter(layout, gradients=4)
    tokens = model.seq_len * layout.microbatch_size
    layer = layer_bytes(model, layout, flash=True, dropout=False) + 14 * tokens * model.d_model / layout.tp
    table = model.vocab_size * model.d_model / layout.tp
    most = 0.0
    for stage in range(layout.pp):
        num_layers = -(-model.num_layers // layout.pp)
        is_last = stage == layout.pp - 1
        ends = (stage == 0) + (is_last and not (model.tied_embeddings and layout.pp == 1))
        elements = num_layers * matrix_elements(model) / layout.tp + ends * table
        chunks = chunks_in_flight("1f1b", layout.pp, stage, layout.num_microbatches)
        logits = 6 * tokens * model.vocab_size / layout.tp if is_last else 0
        most = max(most, elements * each + layer * num_layers * chunks + logits)
    return most


def fsdp2(model: Model, layout: Layout, *, context_parallel: int = 1, fused_loss: bool = False) -> float:
    """torch's FSDP2 as torchtitan uses it: fp32 shards over all of dp and cp, bf16 compute, 1F1B over micro-batches.

    Selective recomputation keeps the layer's input and the results of every other matrix product and of attention. In a
    pipeline weights and their gradients stay whole. A fused loss makes no fp32 copies of the logits.
    """
    h, kv, t, p = model.d_model, model.num_kv_heads * model.head_dim, layout.tp, layout.pp
    tokens = layout.microbatch_size * model.seq_len // context_parallel
    whole = tokens * (2 * (6 * h + 2 * kv + 4 * model.d_ff) / t + (4 * h if t > 1 else 0))
    stream = 2 * tokens * h / t
    kept = {
        "none": whole,
        "selective": 2 * tokens * (4 * h + kv + model.d_ff) / t,
        "full": stream,
    }[layout.recompute]
    layer, table = matrix_elements(model) / t, model.vocab_size * h / t
    most = 0.0
    for stage in range(p):
        num_layers, ends = model.num_layers / p, (stage == 0) + (stage == p - 1)
        elements = num_layers * layer + ends * table
        gathered = 6 * elements if p > 1 else 4 * (table + layer) + 4 * (table + layer)
        held = kept * num_layers * chunks_in_flight("1f1b", p, stage, layout.num_microbatches)
        logits = (2 if fused_loss else LOGIT_BYTES) * tokens * model.vocab_size / t if stage == p - 1 else 0
        state = 16 * elements / (layout.dp * context_parallel)
        most = max(most, state + gathered + held + whole + logits)
    return most


def internevo(model: Model, layout: Layout) -> float:
    """InternEvo: bf16 with fp32 copies and a further fp32 gradient, ZeRO-1 or all sharded, full recomputation."""
    p, tokens = layout.pp, model.seq_len * layout.microbatch_size
    elements = (model.num_layers / p * matrix_elements(model) + model.vocab_size * model.d_model) / layout.tp
    each = bytes_per_parameter(layout) + 4 / layout.dp
    held = layer_bytes(model, layout) * model.num_layers / p * chunks_in_flight("1f1b", p, 0, layout.num_microbatches)
    return elements * each + held + LOGIT_BYTES * tokens * model.vocab_size / layout.tp


def _kept(layout: Layout) -> Layout:
    """The layout without recomputation: what one recomputed layer holds."""
    return Layout(tp=layout.tp, microbatch_size=layout.microbatch_size, sequence_parallel=layout.sequence_parallel)


def _layers(model: Model, layout: Layout, stage: int, *, balanced: bool) -> int:
    if not balanced:
        return -(-model.num_layers // layout.pp)
    return -(-(model.num_layers + 2) // layout.pp) - (stage in (0, layout.pp - 1))
