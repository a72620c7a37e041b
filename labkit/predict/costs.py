"""What the parts of a model cost on one rank: operations, bytes moved, kernels, sums over tp; and in seconds."""

from dataclasses import dataclass
from typing import NamedTuple, Self

from labkit.predict.collectives import Reach, collective_time
from labkit.predict.software import Software
from labkit.spec import Hardware, Model

__all__ = ["Passes", "Work", "attention", "embedding", "head", "layer", "product", "seconds"]

FP8_SHARE = 0.88
"""Products in fp8 reach this part of the share that bf16 reaches: 1402 of 1979 beside 794 of 989 TFLOP/s on an H100
(Bekman, "Machine Learning Engineering", maximum achievable matmul FLOPS)."""

FLASH_SHARE = 0.7
"""Flash attention reaches this part of the rate of products (Dao 2023, arXiv 2307.08691, section 4.1: up to 72 % of the
peak forward and 63 % backward on an A100); its backward takes 5 products for the 2 of the forward."""

UNALIGNED = 4.0
"""Products whose heads have no multiple of 8 entries take this much longer: 16-bit tensor cores want 16 bytes (Anthony
et al. 2024, arXiv 2401.14489, section 6)."""

LAUNCHES_OF_A_SUM = 3
"""Starting a collective takes the program as long as starting three kernels."""

SCORE_BYTES = 20
"""Traffic of one 16-bit score that is not kept on the chip: written by QK^T (2), scaled and masked (4), normalised (4),
dropped out with its mask (5), read by AV and for the backward (5). The backward moves as much."""

STREAM_BYTES = 32
"""Traffic of one 16-bit element of the residual stream in a layer: two norms (6 each with their statistics), two sums
with bias, dropout, mask and residual (10 each). The backward moves as much: stages of forwards and of input gradients
are seen to take equally long (Qi et al. 2023, arXiv 2401.10241, table 9: 18.5 and 18.1 ms, 9.3 for the weights)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a rank does, and for how much it asks the others.

    Attributes:
        product_flops: operations of products of matrices, two for a multiplication and an addition.
        attention_flops: those of flash attention, which reach another rate.
        num_bytes: moved between the device and its memory.
        num_kernels: started on the device.
        sums: all-reduces over tp, or the pairs of all-gather and reduce-scatter that replace them: how many of how many
            bytes each.
    """

    product_flops: float = 0.0
    attention_flops: float = 0.0
    num_bytes: float = 0.0
    num_kernels: float = 0.0
    sums: tuple[tuple[float, float], ...] = ()

    def plus(self, other: Self, times: float = 1.0) -> Self:
        """Return this and `times` the other.

        >>> Work(num_bytes=1.0).plus(Work(num_bytes=2.0), 3).num_bytes
        7.0
        """
        sums = dict.fromkeys(num_bytes for _, num_bytes in self.sums + other.sums)
        counts = {num_bytes: _count(self.sums, num_bytes) + times * _count(other.sums, num_bytes) for num_bytes in sums}
        return type(self)(
            product_flops=self.product_flops + times * other.product_flops,
            attention_flops=self.attention_flops + times * other.attention_flops,
            num_bytes=self.num_bytes + times * other.num_bytes,
            num_kernels=self.num_kernels + times * other.num_kernels,
            sums=tuple((count, num_bytes) for num_bytes, count in counts.items() if count),
        )


def _count(sums: tuple[tuple[float, float], ...], num_bytes: float) -> float:
    return next((count for count, each in sums if each == num_bytes), 0.0)


class Passes(NamedTuple):
    """The work of one micro-batch: forward, backward of the inputs, backward of the weights, and what is recomputed."""

    forward: Work
    inputs: Work
    weights: Work
    again: Work


def product(rows: float, columns: float, inner: float, element_bytes: float) -> Work:
    """Return the work of (rows x inner) times (inner x columns): 2 m n k operations, three matrices moved.

    >>> product(2, 3, 4, 2).product_flops, product(2, 3, 4, 2).num_bytes
    (48, 52)
    """
    moved = element_bytes * (rows * inner + inner * columns + rows * columns)
    return Work(product_flops=2 * rows * columns * inner, num_bytes=moved, num_kernels=1)


def attention(model: Model, tokens: float, tp: int, software: Software) -> tuple[Work, Work, Work]:
    """Return scores, softmax and weighted sum of a layer: forward, backward, and what recomputing it takes.

    4 n S h / tp operations forward (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), half of them where masked
    ones are skipped. Without flash attention every score of every head goes to memory and back.
    """
    flops = 4.0 * tokens * model.seq_len * model.d_model / tp
    if software.skips_masked:
        flops /= 2
    if software.flash_attention:
        forward = Work(attention_flops=flops, num_kernels=1)
        return forward, Work(attention_flops=2.5 * flops, num_kernels=1), forward
    slower = 1.0 if model.head_dim % 8 == 0 else UNALIGNED
    scores = SCORE_BYTES * tokens * model.seq_len * model.num_heads / tp
    forward = Work(product_flops=slower * flops, num_bytes=slower * scores, num_kernels=6)
    return forward, forward.plus(Work(product_flops=forward.product_flops)), forward


def layer(model: Model, tokens: float, software: Software, *, tp: int = 1, sp: bool = False, width: int = 2) -> Passes:
    """Return what one layer costs a rank for `tokens` tokens of its tensor-parallel group.

    24 n h^2 + 4 n S h operations forward for a GPT layer (Narayanan et al. 2021, arXiv 2104.04473, appendix), twice as
    many backward: half for the inputs, half for the weights. Two all-reduces of n h elements over tp either way
    (Shoeybi et al. 2019, arXiv 1909.08053); under sequence parallelism each is an all-gather and a reduce-scatter of
    the same bytes, and norms and sums work on a part of the tokens (Korthikanti et al. 2022, arXiv 2205.05198).

    Args:
        model: shapes.
        tokens: of a micro-batch.
        software: how it is run.
        tp: tensor-parallel degree.
        sp: whether norms and sums are split over the sequence.
        width: bytes of an element.

    >>> gpt = Model(num_layers=1, d_model=64, num_heads=4, vocab_size=256, seq_len=32, activation="gelu")
    >>> found = layer(gpt, 32, Software.preset("megatron-2021"))
    >>> found.forward.product_flops == 24 * 32 * 64**2 + 4 * 32 * 32 * 64
    True
    """
    h, kv_width, ff = model.d_model, model.num_kv_heads * model.head_dim, model.d_ff
    is_gated = model.activation == "swiglu"
    matrices = Work()
    for columns, inner in (
        ((h + 2 * kv_width) / tp, h),
        (h, h / tp),
        *([(ff / tp, h)] * (2 if is_gated else 1)),
        (h, ff / tp),
    ):
        matrices = matrices.plus(product(tokens, columns, inner, width))
    stream = software.stream_bytes if width == 2 else width
    moved = tokens * (STREAM_BYTES * stream / 2 * h / (tp if sp else 1) + width * (3 * h + 2 * ff) / tp)
    rest = Work(num_bytes=moved, num_kernels=6)
    sums, sums_back = (Work(sums=((2, each * tokens * h),)) if tp > 1 else Work() for each in (width, stream))
    core, core_backward, core_again = attention(model, tokens, tp, software)
    forward = matrices.plus(rest).plus(core).plus(sums)
    return Passes(forward, matrices.plus(rest).plus(core_backward).plus(sums_back), matrices, core_again)


def embedding(model: Model, tokens: float, software: Software, *, tp: int = 1, width: int = 2) -> Passes:
    """Return what looking up tokens costs: a row read and written for each, and an all-reduce over tp."""
    stream = software.stream_bytes if width == 2 else width
    row = Work(num_bytes=2 * stream * tokens * model.d_model, num_kernels=2)
    sums = Work(sums=((1, stream * tokens * model.d_model),)) if tp > 1 else Work()
    return Passes(row.plus(sums), Work(), row, Work())


def head(model: Model, tokens: float, software: Software, *, tp: int = 1, width: int = 2) -> Passes:
    """Return what logits and loss cost: 2 n h V / tp operations, each logit written and read, in fp32 too.

    Over tp, three numbers a token are summed for the loss, and the gradient of what came in.
    """
    stream = software.stream_bytes if width == 2 else width
    matrix = product(tokens, model.vocab_size / tp, model.d_model, width)
    logits = Work(num_bytes=10 * tokens * model.vocab_size / tp, num_kernels=6)
    loss = Work(sums=((3, 4 * tokens),)) if tp > 1 else Work()
    sums = Work(sums=((1, stream * tokens * model.d_model),)) if tp > 1 else Work()
    return Passes(matrix.plus(logits).plus(loss), matrix.plus(logits).plus(sums), matrix, Work())


def seconds(work: Work, hardware: Hardware, software: Software, precision: str, tp: Reach) -> float:
    """Return how long a rank takes for it.

    Products at the reached share of the peak, then bytes at the reached share of the memory's rate, then kernels, then
    sums over tp less what of them is hidden: one after the other, nothing else overlaps. It takes no less than the
    program needs to start all of it.

    >>> h100 = Hardware.preset("h100")
    >>> work = Work(product_flops=1e12)
    >>> round(1e3 * seconds(work, h100, Software(), "bf16", Reach(1, 1)), 3)
    1.263
    """
    sixteen_bit = "fp32" if precision == "fp32" else "bf16"
    rate = hardware.peak_flops(precision) * hardware.product_efficiency * (FP8_SHARE if precision == "fp8" else 1.0)
    attention_rate = hardware.peak_flops(sixteen_bit) * hardware.product_efficiency * FLASH_SHARE
    time_s = work.product_flops / rate + work.attention_flops / attention_rate
    time_s += work.num_bytes / (hardware.memory_bytes_per_s * hardware.memory_efficiency)
    time_s += work.num_kernels * software.kernel_s
    for count, num_bytes in work.sums:
        each_s = collective_time("all_reduce", num_bytes, tp, hardware)
        time_s += count * ((1 - software.tp_hidden) * each_s + software.call_s)
    num_sums = sum(count for count, _ in work.sums)
    return max(time_s, software.launch_s * (work.num_kernels + LAUNCHES_OF_A_SUM * num_sums))
