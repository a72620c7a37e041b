"""The shape of a transformer decoder, and its parameter count by arithmetic."""

from dataclasses import dataclass
from typing import Self, cast

from labkit.errors import PlanError
from labkit.spec.checks import choice, divisors, flag, number, whole
from labkit.spec.presets import preset_fields

__all__ = ["Model"]

NORMS = ("rms", "layer")
POSITIONS = ("rope", "learned")
ACTIVATIONS = ("swiglu", "gelu")

_SIZES = ("num_layers", "d_model", "num_heads", "vocab_size", "seq_len")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder-only transformer.

    Attributes:
        num_layers: transformer layers (attention and feed-forward).
        d_model: width of the residual stream.
        num_heads: query heads; each has `d_model / num_heads` entries.
        vocab_size: rows of the embedding.
        seq_len: tokens in a sample.
        num_kv_heads: key and value heads (grouped-query attention, Ainslie et al. 2023, arXiv 2305.13245);
            None = `num_heads`.
        d_ff: width of the feed-forward layer; None = `4 d_model` for gelu, and for swiglu `8/3 d_model` (as many
            parameters as gelu's; Shazeer 2020, arXiv 2002.05202) rounded up to a multiple of 256 from
            `d_model` 1024 on, else of 32.
        norm: "rms" (Zhang and Sennrich 2019) or "layer"; both before attention, before the feed-forward and at the end.
        position: "rope" (Su et al. 2021) or "learned" (a table of `seq_len` rows).
        activation: "swiglu" (three matrices) or "gelu" (two; the tanh form, as in GPT-2).
        bias: whether every linear layer but the head, and LayerNorm, has a bias (RMSNorm has none).
        tied_embeddings: whether the head reuses the embedding's matrix.
        norm_eps: added under the norm's root.
        rope_theta: base of the rotary frequencies.

    `num_kv_heads` and `d_ff` are plain ints once the model exists.

    Raises:
        PlanError: a field of the wrong type or out of range, `d_model` not divisible by `num_heads`, `num_heads` not
            divisible by `num_kv_heads`, or an odd head size with rope.

    >>> model = Model(num_layers=2, d_model=64, num_heads=4, vocab_size=256, seq_len=32)
    >>> model.d_ff, model.num_kv_heads, model.num_parameters
    (192, 4, 139584)
    """

    num_layers: int
    d_model: int
    num_heads: int
    vocab_size: int
    seq_len: int
    num_kv_heads: int = cast(int, None)  # None chooses; an int once the model exists
    d_ff: int = cast(int, None)
    norm: str = "rms"
    position: str = "rope"
    activation: str = "swiglu"
    bias: bool = False
    tied_embeddings: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        clean: dict[str, object] = {name: whole(name, getattr(self, name)) for name in _SIZES}
        clean["norm"] = choice("norm", self.norm, NORMS)
        clean["position"] = choice("position", self.position, POSITIONS)
        clean["activation"] = choice("activation", self.activation, ACTIVATIONS)
        clean["bias"] = flag("bias", self.bias)
        clean["tied_embeddings"] = flag("tied_embeddings", self.tied_embeddings)
        clean["norm_eps"] = number("norm_eps", self.norm_eps, positive=True)
        clean["rope_theta"] = number("rope_theta", self.rope_theta, positive=True)
        kv_heads: object = self.num_kv_heads
        clean["num_kv_heads"] = whole("num_kv_heads", clean["num_heads"] if kv_heads is None else kv_heads)
        d_ff: object = self.d_ff
        chosen = _default_d_ff(cast(int, clean["d_model"]), self.activation)
        clean["d_ff"] = whole("d_ff", chosen if d_ff is None else d_ff)
        for name, value in clean.items():
            object.__setattr__(self, name, value)
        self._check_heads()

    def _check_heads(self) -> None:
        if self.d_model % self.num_heads:
            near = max(1, round(self.d_model / self.num_heads)) * self.num_heads
            raise PlanError(
                f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}: "
                f"every head has d_model / num_heads entries. Use d_model={near}."
            )
        if self.num_heads % self.num_kv_heads:
            near = max(each for each in divisors(self.num_heads) if each <= self.num_kv_heads or each == 1)
            raise PlanError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}: "
                f"each key and value head serves equally many query heads. Use num_kv_heads={near}."
            )
        if self.position == "rope" and self.head_dim % 2:
            raise PlanError(
                f"d_model={self.d_model} / num_heads={self.num_heads} gives heads of {self.head_dim} entries, an odd "
                f"number: rope turns pairs. Use d_model={self.d_model + self.num_heads} or position='learned'."
            )

    @classmethod
    def preset(cls, name: str) -> Self:
        """Return a published model by name; `labkit.spec.PRESETS` lists them with sources.

        Raises:
            PlanError: no such preset.

        >>> Model.preset("llama3-8b").num_parameters
        8030261248
        """
        return cls(**preset_fields(name))  # type: ignore[arg-type]

    @property
    def head_dim(self) -> int:
        """Entries of one head.

        >>> Model.preset("llama3-8b").head_dim
        128
        """
        return self.d_model // self.num_heads

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one layer: two norms, four attention matrices, two or three feed-forward matrices.

        >>> Model.preset("gpt2-124m").num_layer_parameters
        7087872
        """
        kv_width = self.num_kv_heads * self.head_dim
        attention = 2 * self.d_model * self.d_model + 2 * self.d_model * kv_width
        matrices = 3 if self.activation == "swiglu" else 2
        feed_forward = matrices * self.d_model * self.d_ff
        biases = 0
        if self.bias:
            biases = 2 * self.d_model + 2 * kv_width + (matrices - 1) * self.d_ff + self.d_model
        return attention + feed_forward + biases + 2 * self.num_norm_parameters

    @property
    def num_norm_parameters(self) -> int:
        """Parameters of one norm: a weight, and for a LayerNorm with `bias` a bias.

        >>> Model.preset("gpt2-124m").num_norm_parameters
        1536
        """
        return self.d_model * (2 if self.norm == "layer" and self.bias else 1)

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of the two look-up tables: tokens and, where learned, positions.

        >>> Model.preset("gpt2-124m").num_embedding_parameters == 50257 * 768 + 1024 * 768
        True
        """
        positions = self.seq_len if self.position == "learned" else 0
        return (self.vocab_size + positions) * self.d_model

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied matrix counts once.

        >>> Model.preset("gpt2-124m").num_parameters
        124439808
        """
        head = 0 if self.tied_embeddings else self.vocab_size * self.d_model
        layers = self.num_layers * self.num_layer_parameters
        return self.num_embedding_parameters + layers + self.num_norm_parameters + head

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations that training one token takes, forward and backward, recompute not counted.

        `6 N + 12 L H Q S` (PaLM, Chowdhery et al. 2022, arXiv 2204.02311, appendix B): two operations per parameter
        forward and four backward, and attention's two products of every query with all `S` keys. `N` leaves out look-up
        tables that multiply nothing (the embedding where untied, learned positions); the head counts.

        >>> model = Model.preset("llama2-7b")
        >>> model.flops_per_token == 6 * (6_738_415_616 - 32000 * 4096) + 12 * 32 * 4096 * 4096
        True
        """
        looked_up = self.num_embedding_parameters - (self.vocab_size * self.d_model if self.tied_embeddings else 0)
        attention = 12 * self.num_layers * self.num_heads * self.head_dim * self.seq_len
        return 6 * (self.num_parameters - looked_up) + attention

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers, d_model {self.d_model}, {self.num_heads} heads, vocabulary {self.vocab_size}, "
            f"{self.seq_len} tokens: {self.num_parameters:,} parameters"
        )


def _default_d_ff(d_model: int, activation: str) -> int:
    if activation == "gelu":
        return 4 * d_model
    multiple = 256 if d_model >= 1024 else 32
    return -(-8 * d_model // (3 * multiple)) * multiple
