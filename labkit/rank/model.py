"""A decoder-only transformer: the whole of it, or the layers of one pipeline stage.

Shapes: B micro-batch, S sequence, D model, H query heads, G key and value heads, K head size, F feed-forward,
V vocabulary. Under tensor parallelism H, G and F are this rank's share; D is always whole.

Parameter names are the whole model's on every stage, so a name means the same tensor under every layout.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from labkit.rank import precision as precisions
from labkit.rank.fp8_linear import Fp8Linear
from labkit.spec import Model


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads (Ainslie et al. 2023)."""

    def __init__(self, model: Model, recompute: str = "none", precision: str = "fp32") -> None:
        super().__init__()
        self.recompute = recompute
        linear = linear_of(precision)
        width, kv_width = model.d_model, model.num_kv_heads * model.head_dim
        self.head_dim = model.head_dim
        self.group_size = model.num_heads // model.num_kv_heads
        self.query = linear(width, width, bias=model.bias)
        self.key = linear(width, kv_width, bias=model.bias)
        self.value = linear(width, kv_width, bias=model.bias)
        self.output = linear(width, width, bias=model.bias)

    def forward(self, x_BSD: Tensor, rotation_SK: Tensor | None) -> Tensor:
        """Mix every position with those before it. Returns [B, S, D]."""
        batch, length = x_BSD.shape[:2]
        q_BSHK = self.query(x_BSD).view(batch, length, -1, self.head_dim)
        k_BSGK = self.key(x_BSD).view(batch, length, -1, self.head_dim)
        v_BSGK = self.value(x_BSD).view(batch, length, -1, self.head_dim)
        mix = recomputed(self._mix) if self.recompute == "selective" else self._mix
        mixed: Tensor = self.output(mix(q_BSHK, k_BSGK, v_BSGK, rotation_SK).reshape(batch, length, -1))
        return mixed

    def _mix(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, rotation_SK: Tensor | None) -> Tensor:
        """What selective recomputation runs again: much memory, few operations. Returns [B, S, H, K]."""
        if rotation_SK is not None:
            q_BSHK, k_BSGK = rotate(q_BSHK, rotation_SK), rotate(k_BSGK, rotation_SK)
        if self.group_size > 1:
            k_BSGK = k_BSGK.repeat_interleave(self.group_size, dim=2)
            v_BSGK = v_BSGK.repeat_interleave(self.group_size, dim=2)
        mixed_BHSK = functional.scaled_dot_product_attention(
            q_BSHK.transpose(1, 2), k_BSGK.transpose(1, 2), v_BSGK.transpose(1, 2), is_causal=True
        )
        return mixed_BHSK.transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020: three matrices) or GELU in its tanh form (two)."""

    def __init__(self, model: Model, precision: str = "fp32") -> None:
        super().__init__()
        linear = linear_of(precision)
        self.gate = linear(model.d_model, model.d_ff, bias=model.bias) if model.activation == "swiglu" else None
        self.up = linear(model.d_model, model.d_ff, bias=model.bias)
        self.down = linear(model.d_ff, model.d_model, bias=model.bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Transform every position by itself. Returns [B, S, D]."""
        up_BSF = self.up(x_BSD)
        if self.gate is None:
            hidden_BSF = functional.gelu(up_BSF, approximate="tanh")
        else:
            hidden_BSF = functional.silu(self.gate(x_BSD)) * up_BSF
        down: Tensor = self.down(hidden_BSF)
        return down


class Layer(nn.Module):
    """One pre-norm transformer layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, model: Model, recompute: str = "none", precision: str = "fp32") -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = make_norm(model)
        self.attention = Attention(model, recompute, precision)
        self.feed_forward_norm = make_norm(model)
        self.feed_forward = FeedForward(model, precision)

    def forward(self, x_BSD: Tensor, rotation_SK: Tensor | None) -> Tensor:
        """Returns [B, S, D]."""
        run = recomputed(self._run) if self.recompute == "full" else self._run
        return run(x_BSD, rotation_SK)

    def _run(self, x_BSD: Tensor, rotation_SK: Tensor | None) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotation_SK)
        out: Tensor = x_BSD + self.feed_forward(self.feed_forward_norm(x_BSD))
        return out


class Transformer(nn.Module):
    """The layers `layers` of a model; with the embedding where they start it and the head where they end it.

    Args:
        model: its shape.
        layers: which layers to hold; None = all.
        precision: "fp32", "bf16" or "fp8".
        recompute: activations that are not kept for the backward but computed again in it: "none", "selective" (the
            core of attention, Korthikanti et al. 2022, arXiv 2205.05198) or "full" (all but each layer's input).
    """

    def __init__(
        self, model: Model, layers: range | None = None, precision: str = "fp32", recompute: str = "none"
    ) -> None:
        super().__init__()
        layers = range(model.num_layers) if layers is None else layers
        is_first, is_last = layers.start == 0, layers.stop == model.num_layers
        has_positions = is_first and model.position == "learned"
        self.model = model
        self.precision = precision
        self.embedding = nn.Embedding(model.vocab_size, model.d_model) if is_first else None
        self.positions = nn.Embedding(model.seq_len, model.d_model) if has_positions else None
        self.layers = nn.ModuleDict({str(index): Layer(model, recompute, precision) for index in layers})
        self.norm = make_norm(model) if is_last else None
        self.head = nn.Linear(model.d_model, model.vocab_size, bias=False) if is_last else None
        # Which part of the sequence the residual stream holds here, of how many: tensor parallelism may split it.
        self.sequence_part = (0, 1)
        self._rotation_SK: Tensor | None = None
        self.tie()

    def tie(self) -> None:
        """Let the head use the embedding's matrix, where the model says so and this stage holds both."""
        if self.model.tied_embeddings and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage.

        Args:
            x: tokens [B, S] (int64) on the first stage, else the residual stream [B, S, D].

        Returns:
            Logits [B, S, V] on the last stage, else the residual stream [B, S, D].
        """
        with precisions.compute(self.precision, x.device.type):
            if self.embedding is not None:
                x = self.embedding(x)
                if self.positions is not None:
                    first = self.sequence_part[0] * x.shape[1]
                    x = x + self.positions(torch.arange(first, first + x.shape[1], device=x.device))
            rotation_SK = self._rotation(x)
            for layer in self.layers.values():
                x = layer(x, rotation_SK)
            if self.head is not None and self.norm is not None:
                x = self.head(self.norm(x))
        return x

    def _rotation(self, x_BSD: Tensor) -> Tensor | None:
        if self.model.position != "rope":
            return None
        known, length = self._rotation_SK, x_BSD.shape[1] * self.sequence_part[1]
        if known is None or known.shape[0] != length or known.device != x_BSD.device:
            self._rotation_SK = known = rotations(self.model, length, x_BSD.device)
        return known


def recomputed(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function, whose activations are computed again in the backward; nothing in it is random."""
    return partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)


def linear_of(precision: str) -> type[nn.Linear]:
    """What makes the matrices of attention and feed-forward."""
    return Fp8Linear if precision == "fp8" else nn.Linear


def make_norm(model: Model) -> nn.Module:
    """RMSNorm (Zhang and Sennrich 2019), or LayerNorm whose bias follows `model.bias`."""
    if model.norm == "rms":
        return nn.RMSNorm(model.d_model, eps=model.norm_eps)
    return nn.LayerNorm(model.d_model, eps=model.norm_eps, bias=model.bias)


def rotations(model: Model, length: int, device: torch.device) -> Tensor:
    """Unit complex numbers that turn pair k of a head at position s by `s * theta^(-2k/K)` (Su et al. 2021, eq. 34).

    Returns:
        complex64 [S, K/2].
    """
    half = model.head_dim // 2
    exponents = torch.arange(half, device=device, dtype=torch.float32) / half
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), model.rope_theta**-exponents)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x_BSHK: Tensor, rotation_SK: Tensor) -> Tensor:
    """Turn neighbouring entries of every head by its position's angles. Returns [B, S, H, K] in `x`'s dtype."""
    pairs = torch.view_as_complex(x_BSHK.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation_SK[:, None]).flatten(-2).to(x_BSHK.dtype)


def mean_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Cross-entropy in nats, averaged over the micro-batch's tokens; fp32 whatever the logits' dtype."""
    return functional.cross_entropy(logits_BSV.float().flatten(0, 1), targets_BS.flatten())
