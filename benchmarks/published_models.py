"""Shapes of models that published runs name, as far as a layer's work needs them."""

from dataclasses import dataclass, replace

from labkit.spec import Model

GPT = {"norm": "layer", "position": "learned", "activation": "gelu", "bias": True, "tied_embeddings": True}


def gpt(num_layers: int, d_model: int, num_heads: int, seq_len: int, vocab_size: int = 51_200) -> Model:
    """A GPT of Megatron's papers."""
    return Model(
        num_layers=num_layers, d_model=d_model, num_heads=num_heads, vocab_size=vocab_size, seq_len=seq_len, **GPT
    )  # fmt: skip


def llama(num_layers: int, d_model: int, num_heads: int, d_ff: int, vocab_size: int, num_kv_heads: int = 8) -> Model:
    """Gated, with grouped queries; its sequence is the run's."""
    return Model(
        num_layers=num_layers, d_model=d_model, num_heads=num_heads, d_ff=d_ff, vocab_size=vocab_size, seq_len=4096,
        num_kv_heads=num_kv_heads,
    )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model, and what is not dense in it.

    A mixture of experts is a dense model whose feed-forward layer is as wide as the experts that a token visits. A
    hybrid is one whose layers have the operations of a mixer and a feed-forward layer.

    Attributes:
        model: shapes.
        visited: experts that each token visits; 0 where there are none.
        hybrid: whether runs count its layers otherwise: mixers and feed-forward layers one by one.
    """

    model: Model
    visited: int = 0
    hybrid: bool = False


SHAPES = {
    "405b": Shape(Model.preset("llama3-405b")),
    "llama2-70b": Shape(llama(80, 8192, 64, 28_672, 32_000)),
    "70b": Shape(Model.preset("llama3-70b")),
    "llama2-13b": Shape(Model.preset("llama2-13b")),
    "llama2-7b": Shape(Model.preset("llama2-7b")),
    "8b": Shape(Model.preset("llama3-8b")),
    "gpt3-20b": Shape(gpt(44, 6144, 48, 2048)),
    "175b": Shape(gpt(96, 12_288, 96, 2048)),
    "nemotron4 15b": Shape(replace(llama(32, 6144, 48, 24_576, 256_000), activation="gelu")),
    "nemotron-22b": Shape(replace(llama(40, 6144, 48, 24_576, 256_000), activation="gelu")),
    "340b": Shape(replace(llama(96, 18_432, 96, 73_728, 256_000), activation="gelu")),
    "grok": Shape(llama(64, 6144, 48, 2 * 32_768, 131_072), visited=2),
    "maverick": Shape(llama(48, 5120, 40, 16_384, 202_048), visited=1),
    "nemotron-h 56b": Shape(replace(llama(54, 8192, 64, 49_792, 131_072), activation="gelu"), hybrid=True),
}
"""Sources: the models' papers and released configurations; the Nemotrons' from NVIDIA's recipes in NeMo. Maverick's
layers are dense and sparse in turn, both 16,384 wide. Nemotron-H has 54 mixers of 430 million parameters and 54
feed-forward layers 32,768 wide, here as one layer each. The longest name within a run's name counts."""


def shape(name: str) -> Shape | None:
    """The shape that a run's name means, or None."""
    lower = name.lower().replace("llama3.1_", "llama ").replace("_", "-")
    found = [key for key in SHAPES if key in lower]
    return SHAPES[max(found, key=len)] if found else None
