"""The model's mathematics, its stages and its initial weights. Starts no rank."""

import math
from dataclasses import replace

import pytest
import torch

from labkit.plan import build
from labkit.rank.model import Transformer, mean_loss, rotate, rotations
from labkit.rank.parameters import build_stage
from labkit.spec import Layout, Model

MODEL = Model(num_layers=3, d_model=32, num_heads=4, num_kv_heads=2, vocab_size=50, seq_len=12)
KINDS = (
    MODEL,
    replace(MODEL, norm="layer", position="learned", activation="gelu", bias=True, tied_embeddings=True),
    replace(MODEL, norm="layer", num_kv_heads=4),
    replace(MODEL, bias=True, num_kv_heads=1),
)
CPU = torch.device("cpu")


def whole(model, text="dp1", seed=0):
    return build_stage(build(model, Layout.parse(text)), 0, seed, CPU)


def tokens(num_samples=2, model=MODEL):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.vocab_size, (num_samples, model.seq_len), generator=generator)


@pytest.mark.parametrize("model", KINDS, ids=str)
def test_logits_have_a_value_per_token_and_depend_on_the_past_only(model):
    net, x = whole(model), tokens(model=model)
    logits = net(x)
    assert logits.shape == (2, model.seq_len, model.vocab_size)
    changed = x.clone()
    changed[:, 7] = (changed[:, 7] + 1) % model.vocab_size
    others = net(changed)
    torch.testing.assert_close(others[:, :7], logits[:, :7])
    assert (others[:, 7:] - logits[:, 7:]).abs().amax(dim=(0, 2)).min() > 0


@pytest.mark.parametrize("model", KINDS, ids=str)
@pytest.mark.parametrize("text", ["pp2 m2", "pp3 m2"])
def test_stages_in_a_row_are_the_whole_model(model, text):
    plan = build(model, Layout.parse(text))
    x = tokens(model=model)
    expected = whole(model)(x)
    for stage in range(plan.num_stages):
        x = build_stage(plan, stage, 0, CPU)(x)
    torch.testing.assert_close(x, expected, rtol=0, atol=0)


@pytest.mark.parametrize("model", KINDS, ids=str)
def test_a_stage_holds_what_the_plan_counts(model):
    for text in ("dp1", "pp2 m2", "pp3 m2"):
        plan = build(model, Layout.parse(text))
        for stage in range(plan.num_stages):
            built = sum(parameter.numel() for parameter in build_stage(plan, stage, 0, CPU).parameters())
            assert built == plan.num_parameters(plan.rank_at(pp_rank=stage))


def test_initial_weights_depend_on_seed_and_name_only():
    first, again, other = (dict(whole(MODEL, seed=seed).named_parameters()) for seed in (0, 0, 1))
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        if parameter.ndim == 2:
            assert not torch.equal(parameter, other[name])
    assert not torch.equal(first["layers.0.attention.query.weight"], first["layers.1.attention.query.weight"])


def test_initial_weights_have_their_deviation():
    model = replace(MODEL, d_model=128, num_kv_heads=4, bias=True)
    for name, parameter in whole(model).named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0
        elif "norm" in name:
            assert parameter.min() == parameter.max() == 1
        else:
            writes = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            expected = 0.02 / math.sqrt(2 * 3) if writes else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.1)


def test_a_tied_head_is_the_embedding():
    net = whole(replace(MODEL, tied_embeddings=True))
    assert net.head.weight is net.embedding.weight


def test_grouped_heads_are_repeated_whole_heads():
    grouped, full = whole(MODEL), Transformer(replace(MODEL, num_kv_heads=4))
    state = grouped.state_dict()
    for name, weight in state.items():
        if name.endswith(("key.weight", "value.weight")):
            state[name] = weight.view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32)
    full.load_state_dict(state)
    torch.testing.assert_close(full(tokens()), grouped(tokens()))


def test_turned_products_depend_on_distance_only():
    generator = torch.Generator().manual_seed(2)
    query, key = torch.randn(8, generator=generator), torch.randn(8, generator=generator)
    table = rotations(MODEL, 12, CPU)
    queries, keys = (rotate(each.expand(1, 12, 1, 8), table)[0, :, 0] for each in (query, key))
    products = queries @ keys.T
    for distance in range(12):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(12))
    assert products[:, 0].std() > 0.01


def test_attention_is_softmax_of_scaled_products():
    model = replace(MODEL, position="learned", num_kv_heads=4)
    attention = whole(model).layers["0"].attention
    x = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(3))
    q, k, v = (w(x).view(12, 4, 8).transpose(0, 1) for w in (attention.query, attention.key, attention.value))
    scores = q @ k.transpose(1, 2) / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf)
    expected = attention.output((scores.softmax(-1) @ v).transpose(0, 1).reshape(1, 12, 32))
    torch.testing.assert_close(attention(x, None), expected)


def test_the_loss_is_the_mean_over_tokens_in_nats():
    logits = torch.zeros(2, 12, 50)
    assert mean_loss(logits, tokens()).item() == pytest.approx(math.log(50))
    logits = torch.randn(2, 12, 50, generator=torch.Generator().manual_seed(4))
    picked = logits.log_softmax(-1).gather(-1, tokens()[..., None])
    assert mean_loss(logits, tokens()).item() == pytest.approx(-picked.mean().item(), rel=1e-6)


def test_bf16_computes_in_bf16_and_keeps_parameters_and_stream_fp32():
    net = whole(MODEL, "bf16")
    logits = net(tokens())
    assert logits.dtype == torch.bfloat16
    mean_loss(logits, tokens()).backward()
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in net.parameters()} == {torch.float32}
    torch.testing.assert_close(logits.float(), whole(MODEL)(tokens()), rtol=0.05, atol=0.02)
    first = build_stage(build(MODEL, Layout.parse("pp3 m2 bf16")), 0, 0, CPU)
    assert first(tokens()).dtype == torch.float32
