"""What a plan says that ranks hold under ZeRO is what they hold."""

from typing import Any

import pytest

import labkit as lk
from labkit.spec import Layout, Model

pytestmark = pytest.mark.ranks

# Sizes that four ranks do not divide.
MODEL = Model(
    num_layers=3, d_model=24, num_heads=4, vocab_size=258, seq_len=16, d_ff=38, norm="layer", position="learned",
    activation="gelu", bias=True, tied_embeddings=True,
)  # fmt: skip
LAYOUTS = ("dp4 torch", "dp4 zero1 torch", "dp4 zero2 torch", "dp2 tp2 zero3 torch", "dp2 pp2 zero3 torch",
           "dp4 zero2 reshard torch", "dp4 zero3 hybrid2 torch", "dp4 zero3 no_reshard torch")  # fmt: skip


def elements_held() -> tuple[int, int]:
    """Runs in each rank: elements of its weights between two steps, and of AdamW's first moments."""
    from labkit.rank import state

    live = state.current()
    optimizer = getattr(live.optimizer, "_optimizer", live.optimizer)
    moments = sum(one["exp_avg"].numel() for one in optimizer.state.values())
    return sum(tensor.numel() for tensor in live.weights.tensors.values()), moments


@pytest.mark.parametrize("text", LAYOUTS)
def test_ranks_hold_what_the_plan_counts(ranks: Any, text: str) -> None:
    plan = lk.plan.build(MODEL, Layout.parse(text))
    lk.launch.train(ranks, plan, 1, progress=False)
    for rank, (weights, moments) in enumerate(ranks.run(elements_held)):
        holding = plan.holding(rank)
        assert moments == holding.optimizer
        between_steps = holding.parameters if plan.layout.zero_stage < 2 else holding.optimizer
        assert weights == between_steps
