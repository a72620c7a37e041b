"""A Llama-style decoder in plain torch.

Between layers `x` is (batch, sequence, d_model); in attention (batch, heads, sequence, head size).
"""

import torch
from sizes import MODEL
from torch import nn
from torch.nn import functional as F

HEAD_DIM = MODEL["d_model"] // MODEL["num_heads"]


def rotary_table():
    frequencies = 1.0 / 10_000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = torch.outer(torch.arange(MODEL["seq_len"]).float(), frequencies)
    return torch.cat([angles.cos(), angles.cos()], -1), torch.cat([angles.sin(), angles.sin()], -1)


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        d = MODEL["d_model"]
        self.wq = nn.Linear(d, d, bias=False)
        self.wk = nn.Linear(d, MODEL["num_kv_heads"] * HEAD_DIM, bias=False)
        self.wv = nn.Linear(d, MODEL["num_kv_heads"] * HEAD_DIM, bias=False)
        self.wo = nn.Linear(d, d, bias=False)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        # -1: with tensor parallelism a rank holds a part of the heads
        q, k, v = (w(x).view(b, s, -1, HEAD_DIM).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        d, f = MODEL["d_model"], MODEL["d_ff"]
        self.w1, self.w3, self.w2 = (
            nn.Linear(d, f, bias=False),
            nn.Linear(d, f, bias=False),
            nn.Linear(f, d, bias=False),
        )

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(MODEL["d_model"], eps=1e-5), Attention()
        self.feed_forward_norm, self.feed_forward = nn.RMSNorm(MODEL["d_model"], eps=1e-5), FeedForward()

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """All layers, or the part of one pipeline stage."""

    def __init__(self, layers=range(MODEL["num_layers"]), first=True, last=True):
        super().__init__()
        self.embedding = nn.Embedding(MODEL["vocab_size"], MODEL["d_model"]) if first else None
        self.layers = nn.ModuleList(Layer() for _ in layers)
        self.norm = nn.RMSNorm(MODEL["d_model"], eps=1e-5) if last else None
        self.head = nn.Linear(MODEL["d_model"], MODEL["vocab_size"], bias=False) if last else None
        cos, sin = rotary_table()
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
