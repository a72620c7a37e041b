"""The bytes of weights, gradients and optimizer states that `predict.state_bytes` gives are those that ranks hold."""

from typing import Any

import pytest

import labkit as lk
from labkit.errors import PlanError
from labkit.launch.submit import check_memory
from labkit.predict import state_bytes
from labkit.spec import Layout, Model

pytestmark = pytest.mark.ranks

MODEL = Model(num_layers=4, d_model=32, num_heads=4, vocab_size=256, seq_len=16, tied_embeddings=True)
# Sizes that four ranks do not divide.
ODD = Model(
    num_layers=3, d_model=15, num_heads=3, vocab_size=257, seq_len=16, d_ff=37, norm="layer", position="learned",
    activation="gelu", bias=True,
)  # fmt: skip
# On all four ranks.
LAYOUTS = (
    "tp4 b4",
    "dp4",
    "dp4 zero1 torch",
    "dp2 pp2 m2",
    "dp4 zero2 torch",
    "dp4 zero2 reshard torch",
    "dp4 zero3 torch",
    "dp4 zero3 no_reshard bf16 torch",
    "dp4 zero3 hybrid2 torch",
    "dp2 tp2 zero2 b2",
    "dp2 pp2 zero3 zbv v2 m2",
)


def measure() -> None:
    """Runs on a rank: from now on a step's weights and gradients are kept as they are when its last backward ends."""
    from labkit.rank import parameters

    right = parameters.Weights.collect_gradients

    def collect(self: Any) -> Any:
        gradients = right(self)
        parameters.seen = self, dict(gradients)
        return gradients

    parameters.Weights.collect_gradients = collect
    parameters.right = right


def mend() -> None:
    from labkit.rank import parameters

    parameters.Weights.collect_gradients = parameters.right
    del parameters.seen


def held() -> int:
    """Runs on a rank: bytes of weights, gradients and optimizer states."""
    from labkit.rank import parameters, state

    weights, gradients = parameters.seen
    states = state.current().optimizer.state.values()
    moments = [tensor for one in states for name, tensor in one.items() if name.startswith("exp_avg")]
    return sum(
        tensor.numel() * tensor.element_size() for tensor in [*weights.tensors.values(), *gradients.values(), *moments]
    )


def held_by_deepspeed() -> int:
    """Runs on a rank: bytes of weights, of the copy that the optimizer updates, and of optimizer states."""
    from labkit.rank import state

    live = state.current()
    optimizer = live.optimizer
    weights = [getattr(one, "ds_tensor", one) for one in live.weights.engine.module.parameters()]
    names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    copies = [part for name in names for part in getattr(optimizer, name, [])]
    states = optimizer.state.values()
    moments = [tensor for one in states for name, tensor in one.items() if name.startswith("exp_avg")]
    return sum(tensor.numel() * tensor.element_size() for tensor in [*weights, *copies, *moments])


def gathered(plan: Any, rank: int) -> int:
    """Bytes of weights that stay whole only until the backward is over, so that its end does not see them."""
    is_sharded = plan.layout.zero_stage > 1 and not plan.layout.reshards
    return 4 * plan.num_parameters(rank) if is_sharded else 0


def test_ranks_hold_what_was_predicted(ranks: Any) -> None:
    ranks.run(measure)
    try:
        for text in LAYOUTS:
            plan = lk.plan.build(MODEL, Layout.parse(text))
            for optimizer in ("adamw", "sgd"):
                lk.launch.train(ranks, plan, 1, optimizer=optimizer, trace=False, progress=False)
                expected = [
                    state_bytes(plan, rank, optimizer) - gathered(plan, rank) for rank in range(plan.world_size)
                ]
                assert ranks.run(held) == expected, (text, optimizer)
    finally:
        ranks.run(mend)


@pytest.mark.parametrize("text", ["dp4 deepspeed", "dp4 zero1", "dp4 zero2", "dp4 zero3", "dp4 zero3 bf16"])
@pytest.mark.parametrize("model", [MODEL, ODD], ids=["even", "odd"])
def test_deepspeed_holds_what_was_predicted(ranks: Any, text: str, model: Model) -> None:
    plan = lk.plan.build(model, Layout.parse(text))
    assert plan.engine == "deepspeed"
    lk.launch.train(ranks, plan, 1, trace=False, progress=False)
    expected = [state_bytes(plan, rank) - 4 * plan.holding(rank).gradients for rank in range(4)]
    assert ranks.run(held_by_deepspeed) == expected


def test_what_does_not_fit_names_more_sharding_where_that_does() -> None:
    plan = lk.plan.build(MODEL, Layout.parse("dp4"))
    sharded = lk.plan.build(MODEL, Layout.parse("dp4 zero3"))
    enough = sum(state_bytes(plan, rank) for rank in range(4))
    check_memory(plan, "adamw", enough)
    with pytest.raises(PlanError, match=r"of 'dp4' take .* on rank 0\), but .* GiB are free: .* Use 'dp4 zero3'\.$"):
        check_memory(plan, "adamw", enough - 1)
    with pytest.raises(PlanError, match=r"Train a smaller model"):
        check_memory(plan, "adamw", sum(state_bytes(sharded, rank) for rank in range(4)) - 1)
