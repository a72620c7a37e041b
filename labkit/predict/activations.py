"""What the lab's own model keeps of a forward for the backward: one formula for each kind of tensor.

`N` tokens of a micro-batch, `D` width, `H` query heads of `K` entries and `G` key and value heads, `F` feed-forward
width, `V` vocabulary, `t` tensor-parallel degree; `w` bytes of an entry inside attention and feed-forward (4 in fp32,
else 2). The residual stream and the norms are fp32 under every precision. The formulas of Korthikanti et al. 2022
(arXiv 2205.05198, section 4) count the same way for another stack (`labkit.predict.megatron`).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from labkit.plan import Plan
from labkit.predict.sizes import passes_on
from labkit.spec import Layout, Model

__all__ = [
    "KINDS",
    "attention_bytes",
    "feed_forward_bytes",
    "head_bytes",
    "layer_bytes",
    "logit_bytes",
    "loss_bytes",
    "norm_bytes",
    "recomputed_bytes",
    "split_backward_bytes",
    "stage_bytes",
    "stream_bytes",
    "temporary_bytes",
    "weight_copy_bytes",
]

KINDS = ("norms", "attention", "feed-forward", "16-bit weights", "layer inputs", "head and loss", "stage outputs")
"""The kinds of activations, in the order in which pictures stack them."""

FP32 = 4


def stream_bytes(model: Model, layout: Layout) -> int:
    """Bytes of one micro-batch's residual stream on a rank: 4 N D, over t with sequence parallelism.

    >>> stream_bytes(Model.preset("tiny"), Layout.parse("dp1 b2"))  # 2 samples of 128 tokens, 128 wide
    131072
    """
    return FP32 * _tokens(model, layout) * model.d_model // _sequence_parts(layout)


def norm_bytes(model: Model, layout: Layout) -> int:
    """One norm: its input and its statistics in fp32; RMSNorm also keeps what its weight multiplies.

    LayerNorm: 4 N D + 8 N (mean and deviation). RMSNorm: 8 N D + 4 N. Both over t with sequence parallelism
    (Korthikanti et al. 2022, section 4.2.2).

    >>> norm_bytes(Model.preset("tiny"), Layout.parse("dp1"))
    131584
    """
    tensors, statistics = (1, 2) if model.norm == "layer" else (2, 1)
    tokens = _tokens(model, layout) // _sequence_parts(layout)
    return FP32 * tokens * (tensors * model.d_model + statistics)


def attention_bytes(model: Model, layout: Layout) -> int:
    """One attention: its input, then query, key and value as the kernel takes them, its output, and a number a row.

    Flash attention (Dao et al. 2022, arXiv 2205.14135, section 3.1) keeps no scores, only one fp32 number for each
    token and head: `input + 4 w N D / t + 4 N H / t`. The kernel takes keys and values repeated to all H heads. In bf16
    query, key and value each keep a 16-bit copy of the input, 6 N D; in fp32 they share it, 4 N D. FP8 keeps each
    matrix's input in one byte, that of the output matrix as well. Selective recomputation (Korthikanti et al. 2022,
    section 5) keeps query, key and value as they come out of their matrices, before positions and repetition.

    >>> attention_bytes(Model.preset("tiny"), Layout.parse("dp1"))
    331776
    """
    n, t = _tokens(model, layout), layout.tp
    wide, narrow = n * model.d_model // t, n * model.num_kv_heads * model.head_dim // t
    width = _width(layout)
    kept = _inputs_bytes(model, layout, num_matrices=3) + _row_input_bytes(wide, layout)
    if layout.recompute == "selective":
        return kept + width * (wide + 2 * narrow)
    own_output = width * wide if layout.precision == "fp8" else 0  # else it is what the output matrix keeps
    return kept + own_output + 3 * width * wide + FP32 * n * model.num_heads // t


def feed_forward_bytes(model: Model, layout: Layout) -> int:
    """One feed-forward: its input, what the activation function needs, and the input of the last matrix.

    SwiGLU: `input + 4 w N F / t` (gate, its activation, up, their product); GELU: `input + 2 w N F / t`. Inputs are
    kept as in `attention_bytes`. The input stays whole under sequence parallelism: torch keeps it gathered, where
    Korthikanti et al. 2022 (section 4.2.2) gather it once more in the backward.

    >>> feed_forward_bytes(Model.preset("tiny"), Layout.parse("dp1"))
    786432
    """
    is_gated = model.activation == "swiglu"
    hidden = _tokens(model, layout) * model.d_ff // layout.tp
    kept = _inputs_bytes(model, layout, num_matrices=2 if is_gated else 1)
    return kept + (3 if is_gated else 1) * _width(layout) * hidden + _row_input_bytes(hidden, layout)


def weight_copy_bytes(num_elements: int) -> int:
    """The 16-bit copies of matrices that autocast makes in every forward and keeps until its backward: 2 bytes each.

    Micikevicius et al. 2018 (arXiv 1710.03740, section 3.1) keep one such copy of fp32 master weights; here there is
    one for every micro-batch in flight.

    >>> weight_copy_bytes(1000)
    2000
    """
    return 2 * num_elements


def layer_bytes(model: Model, layout: Layout) -> dict[str, int]:
    """What one layer keeps for one micro-batch, by kind.

    Full recomputation (Chen et al. 2016, arXiv 1604.06174) keeps the layer's input alone.

    >>> layer_bytes(Model.preset("tiny"), Layout.parse("dp1 recompute:full"))
    {'layer inputs': 65536}
    """
    if layout.recompute == "full":
        return {"layer inputs": stream_bytes(model, layout)}
    kept = {
        "norms": 2 * norm_bytes(model, layout),
        "attention": attention_bytes(model, layout),
        "feed-forward": feed_forward_bytes(model, layout),
    }
    if layout.precision == "bf16":
        kept["16-bit weights"] = weight_copy_bytes(_matrix_elements(model) // layout.tp)
    return kept


def head_bytes(model: Model, layout: Layout) -> dict[str, int]:
    """What the final norm, the head and the loss keep: the head's input, and logarithms of probabilities in fp32.

    `input + 4 N V / t`: logits are split over the vocabulary (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

    >>> head_bytes(Model.preset("tiny"), Layout.parse("dp1"))
    {'norms': 131584, 'head and loss': 196612}
    """
    n = _tokens(model, layout)
    kept = {
        "norms": norm_bytes(model, layout),
        "head and loss": _width(layout) * n * model.d_model + logit_bytes(model, layout) + FP32,
    }
    if layout.precision != "fp32":
        kept["16-bit weights"] = weight_copy_bytes(model.vocab_size * model.d_model // layout.tp)
    return kept


def logit_bytes(model: Model, layout: Layout) -> int:
    """One micro-batch's logits in fp32 on a rank: 4 N V / t.

    >>> logit_bytes(Model.preset("tiny"), Layout.parse("tp2"))
    65536
    """
    return FP32 * _tokens(model, layout) * model.vocab_size // layout.tp


def stage_bytes(plan: Plan, stage: int) -> Mapping[str, int]:
    """What a stage holds of one micro-batch from its forward to its backward, by kind.

    Beside what its layers keep: the first stage's tokens where tensor parallelism masks them, and in a pipeline the
    stage's own output, which torch holds until the backward begins. The input that a stage received is no part of it,
    because the buffer it came in is there anyway (`labkit.predict.buffers`).

    >>> from labkit import plan
    >>> built = plan.build(Model.preset("tiny"), Layout.parse("pp2"))
    >>> dict(stage_bytes(built, 0)) == {name: 2 * size for name, size in layer_bytes(built.model, built.layout).items()
    ...     } | {"stage outputs": 65536}
    True
    """
    model, layout = plan.model, plan.layout
    num_layers, is_first, is_last = len(plan.layers(stage)), stage == 0, stage == plan.num_stages - 1
    kept = Counter({kind: num_layers * size for kind, size in layer_bytes(model, layout).items()})
    stream = stream_bytes(model, layout)
    if is_first:
        kept["layer inputs"] += _token_bytes(model, layout)
    else:  # the first layer's input lies in the buffer that it was received in
        kept["layer inputs" if layout.recompute == "full" else "norms"] -= stream
    if is_last:
        kept.update(head_bytes(model, layout))
    if plan.num_stages > 1:
        if is_last:
            kept["stage outputs"] += logit_bytes(model, layout) * _width(layout) // FP32
        elif not passes_on(plan, stage):  # else it is the next stage's buffer
            kept["stage outputs"] += stream
    return {kind: kept[kind] for kind in KINDS if kept[kind]}


def split_backward_bytes(plan: Plan, stage: int) -> int:
    """What a stage holds beside its activations between the two halves of a backward (`I` and `W`).

    Qi et al. 2023 (arXiv 2401.10241, section 2.2) free part of the activations there. torch frees none before `W`, but
    for logits and loss, and keeps the gradient of each matrix's and norm's output as well: for a layer 8 N D of the
    norms, and in `w` bytes each `(2 H + 2 G) K` of attention (with its output matrix) and of the feed-forward gate, up
    and down. Stage 0 has no input to find a gradient for, so there `I` does nothing and `W` is the whole backward.

    >>> from labkit import plan
    >>> built = plan.build(Model.preset("tiny"), Layout.parse("pp2 zbv v2"))
    >>> [split_backward_bytes(built, stage) for stage in range(4)]
    [0, 688128, 688128, 688128]
    """
    if stage == 0:
        return 0
    model, layout = plan.model, plan.layout
    n, t, width = _tokens(model, layout), layout.tp, _width(layout)
    stream = stream_bytes(model, layout)
    gates = 2 if model.activation == "swiglu" else 1
    inner = model.d_model + 2 * model.num_kv_heads * model.head_dim + gates * model.d_ff
    whole = 2 * model.d_model // _sequence_parts(layout)
    kept = len(plan.layers(stage)) * (2 * stream + width * n * (inner // t + whole))
    if stage == plan.num_stages - 1:
        return kept + stream - logit_bytes(model, layout)
    return kept - (stream if layout.precision == "fp32" else 0)  # the last matrix's is the gradient that came in


def loss_bytes(model: Model, layout: Layout) -> int:
    """The gradients of the loss that are on their way before any layer's: of logarithms and of logits, 8 N V / t.

    torch's `loss_parallel` has one more of that size, where the vocabulary is split.

    >>> loss_bytes(Model.preset("tiny"), Layout.parse("dp1")), loss_bytes(Model.preset("tiny"), Layout.parse("tp2"))
    (262144, 196608)
    """
    return (3 if layout.tp > 1 else 2) * logit_bytes(model, layout)


def recomputed_bytes(model: Model, layout: Layout) -> int:
    """What the backward of one layer computes again, and holds while it lasts.

    >>> recomputed_bytes(Model.preset("tiny"), Layout.parse("dp1 recompute:selective"))  # 3 w N D / t + 4 N H / t
    200704
    """
    if layout.recompute == "none":
        return 0
    if layout.recompute == "selective":
        tokens = _tokens(model, layout)
        return (3 * _width(layout) * tokens * model.d_model + FP32 * tokens * model.num_heads) // layout.tp
    whole = layer_bytes(model, replace(layout, recompute="none"))
    return sum(whole.values()) - stream_bytes(model, layout)


def temporary_bytes(model: Model, layout: Layout) -> int:
    """The gradients that are on their way in a layer's backward: of the stream, and two of the feed-forward's width.

    `4 N D + 2 w N F / t`; on a CPU FP8 products work on fp32 copies, four of that width.

    >>> temporary_bytes(Model.preset("tiny"), Layout.parse("dp1"))
    425984
    """
    tokens = _tokens(model, layout)
    width = 4 * FP32 if layout.precision == "fp8" else 2 * _width(layout)
    return stream_bytes(model, layout) + width * tokens * model.d_ff // layout.tp


def _tokens(model: Model, layout: Layout) -> int:
    """Tokens of a micro-batch."""
    return layout.microbatch_size * model.seq_len


def _sequence_parts(layout: Layout) -> int:
    return layout.tp if layout.sequence_parallel else 1


def _width(layout: Layout) -> int:
    """Bytes of an entry between the matrices of a layer."""
    return FP32 if layout.precision == "fp32" else 2


def _inputs_bytes(model: Model, layout: Layout, *, num_matrices: int) -> int:
    """What matrices that share an input keep of it; every copy in FP8 has its scale beside it."""
    whole = _tokens(model, layout) * model.d_model
    if layout.precision == "fp32":
        return FP32 * whole
    return num_matrices * (whole + FP32 if layout.precision == "fp8" else 2 * whole)


def _row_input_bytes(num_elements: int, layout: Layout) -> int:
    """What the output and the down matrix keep of their inputs."""
    return num_elements + FP32 if layout.precision == "fp8" else _width(layout) * num_elements


def _matrix_elements(model: Model) -> int:
    """Elements of a layer's matrices: its parameters without norms and biases."""
    kv_width = model.num_kv_heads * model.head_dim
    feed_forward = (3 if model.activation == "swiglu" else 2) * model.d_ff
    return model.d_model * (2 * model.d_model + 2 * kv_width + feed_forward)


def _token_bytes(model: Model, layout: Layout) -> int:
    """Indices into the tables, int64: tensor parallelism masks a copy of the tokens, learned positions count up."""
    masked = 8 * _tokens(model, layout) if layout.tp > 1 else 0
    counted = 8 * model.seq_len // _sequence_parts(layout) if model.position == "learned" else 0
    return masked + counted
