"""Published models as field values.

Sources of the shapes (and of the counts that a test compares with):

- gpt2-124m: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; `openai/gpt-2` hparams of the
  124M checkpoint. 124,439,808 parameters.
- llama2-7b, llama2-13b: Touvron et al. 2023, arXiv 2307.09288, and the released `params.json`; feed-forward widths
  11,008 and 13,824. 6,738,415,616 and 13,015,864,320 parameters.
- llama3-8b, llama3-70b, llama3-405b: Grattafiori et al. 2024, arXiv 2407.21783, table 3 and the released `params.json`;
  8 key and value heads, vocabulary 128,256, rope base 500,000. 8,030,261,248, 70,553,706,496 and 405,853,388,800
  parameters.
- tiny: made for this lab: byte tokens, small enough for four ranks on two cores, and divisible by degrees 2 and 4.
"""

from collections.abc import Mapping
from types import MappingProxyType

from labkit.errors import PlanError
from labkit.spec.checks import nearest, shown

__all__ = ["PRESETS", "preset_fields"]

Fields = Mapping[str, object]


def _fields(num_layers: int, d_model: int, num_heads: int, vocab_size: int, seq_len: int, **others: object) -> Fields:
    sizes = {
        "num_layers": num_layers,
        "d_model": d_model,
        "num_heads": num_heads,
        "vocab_size": vocab_size,
        "seq_len": seq_len,
    }
    return MappingProxyType(sizes | others)


def _llama3(num_layers: int, d_model: int, num_heads: int, d_ff: int) -> Fields:
    return _fields(num_layers, d_model, num_heads, 128_256, 8192, num_kv_heads=8, d_ff=d_ff, rope_theta=500_000.0)


PRESETS: Mapping[str, Fields] = MappingProxyType(
    {
        "tiny": _fields(4, 128, 8, 256, 128, num_kv_heads=4, d_ff=352),
        "gpt2-124m": _fields(
            12,
            768,
            12,
            50_257,
            1024,
            d_ff=3072,
            norm="layer",
            position="learned",
            activation="gelu",
            bias=True,
            tied_embeddings=True,
        ),
        "llama2-7b": _fields(32, 4096, 32, 32_000, 4096, d_ff=11_008),
        "llama2-13b": _fields(40, 5120, 40, 32_000, 4096, d_ff=13_824),
        "llama3-8b": _llama3(32, 4096, 32, 14_336),
        "llama3-70b": _llama3(80, 8192, 64, 28_672),
        "llama3-405b": _llama3(126, 16_384, 128, 53_248),
    }
)
"""Preset name -> fields of `Model`."""


def preset_fields(name: object) -> Fields:
    """Return the fields of a preset.

    Raises:
        PlanError: no such preset; the message lists all and names the nearest.

    >>> preset_fields("llama3-8b")["num_layers"]
    32
    """
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    guess = nearest(name, PRESETS) if isinstance(name, str) else None
    hint = f" Did you mean {guess!r}?" if guess else ""
    raise PlanError(f"preset {shown(name)} is unknown: the presets are {', '.join(PRESETS)}.{hint}")
