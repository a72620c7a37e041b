"""What is known about a run besides its configuration: ranks, model, launcher, what was printed."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from labkit.spec import Model

__all__ = ["Facts", "facts_of_remarks", "is_remark"]

_REMARKS = ("question", "observed", "comment", "comments", "notes", "description")
_HUGGING_FACE = re.compile(
    r"\bhf\b|hugging|trainer|transformers|accelerate|llama.?factory|axolotl|\btrl\b|swift", re.IGNORECASE
)
_OTHER_LAUNCHER = re.compile(
    r"deepspeed\.initialize|lightning|megatron|fabric|^(deepspeed|torchrun|python|pytorch)$", re.IGNORECASE
)
_PIPELINE = re.compile(
    r"PipelineModule|pipeline engine|pipeline.?parallel|train_batch\(\)|\bdeepspeed\.pipe\b", re.IGNORECASE
)
_BF16_TRAINED = re.compile(
    r"bf16|bfloat16|llama|mistral|mixtral|qwen|gemma|\bm?t5\b|flan|bloom|falcon|deepseek|baichuan|alpaca|vicuna|yi-",
    re.IGNORECASE,
)
_EXPERTS = re.compile(
    r"\bmoe\b|mixtral|mixture of experts|\bexperts\b|-a\d+b\b|qwen\d?_?moe|deepseek-v[23]", re.IGNORECASE
)
_PRODUCT = re.compile(r"(\d+)\s*!=\s*(\d+)\s*\*\s*(\d+)\s*\*\s*(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known besides the file; None and "" = unknown.

    Attributes:
        world_size: ranks that take part.
        model: the model, where it is one of labkit's.
        hidden_size: width of the model.
        version: DeepSpeed's version.
        launcher: what reads the configuration.
        words: every text in the remarks, an error message among them.
    """

    world_size: int | None = None
    model: Model | None = None
    hidden_size: int | None = None
    version: str = ""
    launcher: str = ""
    words: str = ""

    @property
    def is_hugging_face(self) -> bool | None:
        """Whether Trainer or Accelerate fills in "auto"; None = unknown."""
        if _HUGGING_FACE.search(self.launcher) or "TrainingArguments" in self.words:
            return True
        return False if _OTHER_LAUNCHER.search(self.launcher) or "deepspeed.initialize" in self.words else None

    @property
    def is_pipeline(self) -> bool:
        """Whether the model is a PipelineModule."""
        return bool(_PIPELINE.search(self.words))

    @property
    def was_trained_in_bf16(self) -> bool:
        """Whether the remarks name a model whose published weights were trained in bfloat16."""
        return bool(_BF16_TRAINED.search(self.words))

    @property
    def has_experts(self) -> bool:
        """Whether the remarks name a mixture of experts."""
        return bool(_EXPERTS.search(self.words))

    def at_least(self, major: int, minor: int) -> bool | None:
        """Whether DeepSpeed's version is at least this; None = unknown."""
        match = re.match(r"v?(\d{1,4})\.(\d{1,4})", self.version)
        return (int(match[1]), int(match[2])) >= (major, minor) if match else None


def is_remark(name: str) -> bool:
    """Whether a top-level key is a remark: DeepSpeed ignores it, and people write comments so.

    >>> is_remark("_context"), is_remark("fp16")
    (True, False)
    """
    return name.startswith(("_", "//", "#", "$")) or name in _REMARKS


def facts_of_remarks(remarks: Mapping[str, object], given: Facts) -> Facts:
    """Complete `given` from remarks, such as `{"_context": {"world_size": 7}}`; what is given counts more."""
    pairs = _flatten(remarks)
    flat = dict(pairs)
    words = "\n".join([given.words, *(f"{name}: {value}" for name, value in pairs)]).strip()
    product = _PRODUCT.search(words)
    ranks = _count(
        flat, "world_size", "num_gpus", "gpus", "n_gpus", "gpu_count", "num_ranks", "ranks", "nproc_per_node"
    )
    nodes = _count(flat, "nodes", "num_nodes", "nnodes") or 1
    if ranks and not _count(flat, "world_size", "num_ranks", "ranks"):
        ranks *= nodes
    if product:
        ranks = int(product[4])
    model = given.model
    return replace(
        given,
        words=words,
        world_size=given.world_size or ranks,
        hidden_size=given.hidden_size
        or (model.d_model if model else _count(flat, "model_hidden_size", "hidden_size", "d_model", "hidden")),
        version=given.version or _text(flat, "deepspeed", "deepspeed_version", "version"),
        launcher=given.launcher or _text(flat, "launcher", "framework", "integration", "trainer", "library", "call"),
    )


def _flatten(value: object, name: str = "", depth: int = 0) -> list[tuple[str, object]]:
    if depth > 4:
        return []
    if isinstance(value, Mapping):
        return [pair for key, one in value.items() for pair in _flatten(one, str(key), depth + 1)][:400]
    if isinstance(value, list):
        return [pair for one in value[:100] for pair in _flatten(one, name, depth + 1)]
    return [(name, value)]


def _count(flat: Mapping[str, object], *names: str) -> int | None:
    for name in names:
        value = flat.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**7:
            return value
    return None


def _text(flat: Mapping[str, object], *names: str) -> str:
    return next((value for name in names if isinstance(value := flat.get(name), str)), "")
