"""How many elements of its stages' parameters a rank has and keeps: a layer once, times the layers."""

from functools import lru_cache

from labkit.plan import Plan
from labkit.plan.holding import Holding, held, on_rank
from labkit.plan.parameters import HEAD, Parameter, of_ends, of_layer

__all__ = ["end_elements", "head_elements", "homes", "layer_elements", "passes_on", "stage_elements", "stage_holding"]


def layer_elements(plan: Plan) -> int:
    """Elements of a layer on a rank, before ZeRO.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> layer_elements(plan.build(Model.preset("tiny"), Layout.parse("dp4 zero3")))
    184576
    """
    return _elements(of_layer(plan.model), plan.layout.tp)


def end_elements(plan: Plan, stage: int) -> int:
    """Elements that a stage has on a rank outside its layers: embedding, positions, last norm, head."""
    first, last = of_ends(plan, stage)
    return _elements((*first, *last), plan.layout.tp)


def head_elements(plan: Plan, stage: int) -> int:
    """Elements of the head that a stage has on a rank; a matrix that is the embedding's counts."""
    _, last = of_ends(plan, stage)
    own = _elements(tuple(one for one in last if one.name == HEAD), plan.layout.tp)
    shares = bool(last) and not own
    return plan.model.vocab_size * plan.model.d_model // plan.layout.tp if shares else own


def stage_elements(plan: Plan, stage: int) -> int:
    """Elements of a stage on a rank, before ZeRO.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> built = plan.build(Model.preset("tiny"), Layout.parse("pp2"))
    >>> [stage_elements(built, stage) for stage in (0, 1)] == [built.num_parameters(rank) for rank in (0, 1)]
    True
    """
    return len(plan.layers(stage)) * layer_elements(plan) + end_elements(plan, stage)


def stage_holding(plan: Plan, stage: int, dp_rank: int) -> Holding:
    """What a rank keeps of one stage's parameters, gradients and optimizer states, in elements (`Plan.holding`).

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> built = plan.build(Model.preset("tiny"), Layout.parse("dp4 zero3"))
    >>> stage_holding(built, 0, 3) == built.holding(3)
    True
    """
    first, last = of_ends(plan, stage)
    layers = len(plan.layers(stage)) * of_layer(plan.model) if plan.engine == "deepspeed" else ()
    ends = held(plan.layout, plan.engine, (*first, *layers, *last), dp_rank)
    if layers:  # DeepSpeed cuts them together
        return ends
    layer = held(plan.layout, plan.engine, of_layer(plan.model), dp_rank)
    num_layers = len(plan.layers(stage))
    return Holding(*(end + num_layers * each for end, each in zip(ends, layer, strict=True)))


@lru_cache(maxsize=64)
def homes(plan: Plan) -> dict[int, int]:
    """Return the pp rank of every stage.

    >>> from labkit import plan
    >>> from labkit.spec import Layout, Model
    >>> homes(plan.build(Model.preset("tiny"), Layout.parse("pp2 zbv v2")))
    {0: 0, 3: 0, 1: 1, 2: 1}
    """
    ranks = range(plan.layout.pp)
    return {stage: pp_rank for pp_rank in ranks for stage in plan.stages(plan.rank_at(pp_rank=pp_rank))}


def passes_on(plan: Plan, stage: int) -> bool:
    """Whether a stage's output stays on its rank, as the next stage's input."""
    return stage + 1 < plan.num_stages and homes(plan)[stage] == homes(plan)[stage + 1]


def _elements(parameters: tuple[Parameter, ...] | list[Parameter], tp: int) -> int:
    return sum(rows * columns for rows, columns in (on_rank(one, tp) for one in parameters))
