"""Memory of 16-bit training as Megatron-LM does it, by the published formulas: for large models and published tables.

`s` tokens of a sample, `b` samples of a micro-batch, `h` width, `a` heads, `f` feed-forward width, `t` tensor-parallel
degree. The lab's own model keeps other tensors (`labkit.predict.activations`): its residual stream is fp32, it has no
dropout, and torch keeps gathered inputs.
"""

from labkit.spec import Layout, Model

__all__ = ["bytes_per_parameter", "chunks_in_flight", "layer_bytes", "layers_state_bytes"]


def bytes_per_parameter(layout: Layout, *, gradients: int = 2) -> float:
    """Bytes of training state of one parameter on a rank: 16-bit weight, gradient, and 12 of Adam in fp32.

    Rajbhandari et al. 2020 (arXiv 1910.02054, section 5 and table 1): 2 + 2 + 12; stage 1 divides the 12 by dp, stage 2
    the gradient too, stage 3 all. Megatron-LM sums gradients in fp32 (`gradients=4`), 18 in all, which is the state of
    Korthikanti et al. 2022 (arXiv 2205.05198, figure 1).

    >>> [bytes_per_parameter(Layout(dp=64, zero_stage=stage)) for stage in range(4)]
    [16.0, 4.1875, 2.21875, 0.25]
    """
    parts = layout.dp // layout.hybrid
    divided = [parts if layout.zero_stage >= stage else 1 for stage in (3, 2, 1)]
    return sum(size / part for size, part in zip((2, gradients, 12), divided, strict=True))


def layers_state_bytes(model: Model, layout: Layout, num_layers: int, *, gradients: int = 2) -> float:
    """State of so many layers on a rank without the model's ends: about 12 h^2 parameters a layer, over t.

    >>> model = Model(num_layers=105, d_model=20480, num_heads=128, vocab_size=51200, seq_len=2048, activation="gelu",
    ...     norm="layer", position="learned")
    >>> round(layers_state_bytes(model, Layout(tp=8), 3, gradients=4) / 2**30, 2)  # 530B, figure 1: 31.64
    31.64
    """
    kv_width = model.num_kv_heads * model.head_dim
    feed_forward = (3 if model.activation == "swiglu" else 2) * model.d_ff
    matrices = model.d_model * (2 * model.d_model + 2 * kv_width + feed_forward)
    return num_layers * matrices / layout.tp * bytes_per_parameter(layout, gradients=gradients)


def layer_bytes(
    model: Model, layout: Layout, *, flash: bool = False, dropout: bool = True, gathered: bool = False
) -> float:
    """What one layer keeps of one micro-batch (Korthikanti et al. 2022, arXiv 2205.05198, equations 1 to 4, table 2).

    For GELU with `f = 4 h` and dropout: `s b h (10 + 24 / t + 5 a s / (h t))`; sequence parallelism divides the 10 too;
    selective recomputation and flash attention leave out the scores, `5 a s / (h t)`; full recomputation keeps the
    layer's input, `2 s b h`. The 10 are the inputs of attention and feed-forward (4), of the norms (4) and two masks of
    dropout (2); the 24 are query, key and value (6), the output's input (2) and the feed-forward (4 f / h, twice that
    for SwiGLU).

    Args:
        model: its shape.
        layout: micro-batch size, tp, sequence parallelism, recomputation.
        flash: whether attention keeps no scores.
        dropout: whether there is any.
        gathered: whether inputs stay whole under sequence parallelism, and are not gathered again in the backward.

    >>> model = Model(num_layers=48, d_model=6144, num_heads=64, vocab_size=51200, seq_len=2048, activation="gelu",
    ...     norm="layer", position="learned")
    >>> sbh = 2048 * 4 * 6144
    >>> [round(layer_bytes(model, Layout.parse(text)) / sbh, 2) for text in
    ...     ("b4", "tp8 b4", "tp8 sp b4", "tp8 sp b4 recompute:selective", "tp8 b4 recompute:full")]
    [140.67, 26.33, 17.58, 4.25, 2.0]
    """
    s, h, t = model.seq_len, model.d_model, layout.tp
    stream = s * layout.microbatch_size * h
    if layout.recompute == "full":
        return 2 * stream / (t if layout.sequence_parallel and gathered else 1)
    hidden = (8 if model.activation == "swiglu" else 4) * model.d_ff / h
    split = 4 + 4 * model.num_kv_heads / model.num_heads + hidden
    inputs, rest = 4, 6 if dropout else 4
    if layout.sequence_parallel:
        inputs, rest, split = (4, 0, split + rest) if gathered else (0, 0, split + rest + 4)
    if not flash and layout.recompute == "none":
        split += (5 if dropout else 4) * model.num_heads * s / h
    return stream * (inputs + rest + split / t)


def chunks_in_flight(schedule: str, p: int, rank: int, num_microbatches: int, v: int = 1) -> int:
    """Of how many micro-batches a rank holds the activations of one of its `v` stages, at most, in all its stages.

    "1f1b": p - r (Korthikanti et al. 2022, section 4.2.3: all L layers' worth on the first). "interleaved": as many as
    fill it, (v - 1) p + 2 (p - 1 - r) + 1. "zb1p" and "zb2p": p and 2 p - 1 on every rank (Qi et al. 2023, arXiv
    2401.10241, section 4: bounds of p and 2 p times one micro-batch). "gpipe": all.

    >>> [chunks_in_flight("1f1b", 4, rank, 8) for rank in range(4)]
    [4, 3, 2, 1]
    >>> chunks_in_flight("interleaved", 35, 0, 280, 3) == 35 * 3 + 35 - 1  # L (1 + (p - 1) / (p m)), L = p m = 105
    True
    """
    most = {
        "1f1b": p - rank,
        "gpipe": num_microbatches,
        "interleaved": (v - 1) * p + 2 * (p - 1 - rank) + 1 if v > 1 else p - rank,
        "zb1p": p,
        "zb2p": 2 * p - 1,
    }[schedule]
    return min(most, num_microbatches * v)
