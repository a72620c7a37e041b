"""The parameters of a stage: names, shapes, and along which side tensor parallelism splits them."""

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from labkit.spec import Model

if TYPE_CHECKING:
    from labkit.plan.plan import Plan

__all__ = ["EMBEDDING", "HEAD", "Parameter", "canonical", "of_ends", "of_layer", "of_stage"]

EMBEDDING = "embedding.weight"
HEAD = "head.weight"


class Parameter(NamedTuple):
    """One parameter, whole.

    Attributes:
        name: its name in the whole model.
        rows: outputs of a matrix (or entries of a table, or of a vector).
        columns: inputs of a matrix; 1 for a vector.
        split: what tensor parallelism splits: "rows", "columns" or "" (every rank holds all of it).
    """

    name: str
    rows: int
    columns: int
    split: str

    @property
    def num_elements(self) -> int:
        """How many numbers it has."""
        return self.rows * self.columns


def canonical(name: str, model: Model) -> str:
    """The name of the parameter in the whole model: a tied head goes by the embedding's."""
    return EMBEDDING if name == HEAD and model.tied_embeddings else name


def of_stage(plan: "Plan", stage: int) -> list[Parameter]:
    """Return what a stage holds, by the names of its own modules, in their order.

    With tied embeddings and several stages both ends hold the matrix: the last one as its head.

    >>> from labkit.plan import Plan
    >>> from labkit.spec import Layout, Model
    >>> plan = Plan(model=Model.preset("tiny"), layout=Layout.parse("pp4"))
    >>> [(one.name, one.rows, one.columns, one.split) for one in of_stage(plan, 3)[-2:]]
    [('norm.weight', 128, 1, ''), ('head.weight', 256, 128, 'rows')]
    """
    first, last = of_ends(plan, stage)
    layers = [
        one._replace(name=f"layers.{layer}.{one.name}") for layer in plan.layers(stage) for one in of_layer(plan.model)
    ]
    return [*first, *layers, *last]


def of_ends(plan: "Plan", stage: int) -> tuple[list[Parameter], list[Parameter]]:
    """Return what a stage holds before its layers and after them: the model's two ends, or nothing.

    >>> from labkit.plan import Plan
    >>> from labkit.spec import Layout, Model
    >>> plan = Plan(model=Model.preset("tiny"), layout=Layout.parse("pp4"))
    >>> [[one.name for one in end] for end in of_ends(plan, 0)]
    [['embedding.weight'], []]
    """
    model, first, last = plan.model, [], []
    if stage == 0:
        first.append(Parameter(EMBEDDING, model.vocab_size, model.d_model, "rows"))
        if model.position == "learned":
            first.append(Parameter("positions.weight", model.seq_len, model.d_model, ""))
    if stage == plan.num_stages - 1:
        last += _norm(model, "norm")
        if not model.tied_embeddings or plan.num_stages > 1:
            last.append(Parameter(HEAD, model.vocab_size, model.d_model, "rows"))
    return first, last


@lru_cache(maxsize=16)
def of_layer(model: Model) -> tuple[Parameter, ...]:
    """Return what a layer holds, by its names within it."""
    width, kv_width = model.d_model, model.num_kv_heads * model.head_dim
    columns = [("attention.query", width), ("attention.key", kv_width), ("attention.value", kv_width)]
    found = _norm(model, "attention_norm")
    for name, rows in columns:
        found += _linear(model, name, rows, width, "rows")
    found += _linear(model, "attention.output", width, width, "columns")
    found += _norm(model, "feed_forward_norm")
    for name in ("gate", "up") if model.activation == "swiglu" else ("up",):
        found += _linear(model, f"feed_forward.{name}", model.d_ff, width, "rows")
    found += _linear(model, "feed_forward.down", width, model.d_ff, "columns")
    return tuple(found)


def _linear(model: Model, name: str, rows: int, columns: int, split: str) -> list[Parameter]:
    found = [Parameter(f"{name}.weight", rows, columns, split)]
    if model.bias:
        found.append(Parameter(f"{name}.bias", rows, 1, split if split == "rows" else ""))
    return found


def _norm(model: Model, name: str) -> list[Parameter]:
    found = [Parameter(f"{name}.weight", model.d_model, 1, "")]
    if model.norm == "layer" and model.bias:
        found.append(Parameter(f"{name}.bias", model.d_model, 1, ""))
    return found
