"""GPT-2 in plain PyTorch: without the hundred megabytes that a library of models takes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.activations.models import Shape


class _Block(nn.Module):
    """Attention, then a perceptron; each normalises its input and adds its result to it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        merged = self.query_key_value(self.attention_norm(x))
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in merged.chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(-2))
        return x + self.narrow(F.gelu(self.widen(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder-only transformer of a `Shape`, weights and biases as GPT-2 has them.

    Args:
        shape: how large; its head is not tied to the embedding.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.Sequential(*(_Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each next token.

        Args:
            tokens: int64, of shape (batch, sequence).
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.positions(places))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
