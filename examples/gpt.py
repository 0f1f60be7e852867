"""A small byte-level GPT in plain PyTorch. Nothing in it knows that tensors are offloaded."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # one token for each value of a byte


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model.

    Args:
        layers: Transformer blocks.
        width: Features per token; a multiple of twice `heads`.
        heads: Attention heads per block.
        context: Longest sequence, in tokens.
    """

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} is no multiple of twice the {self.heads} heads")


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of features of `x` by its position's angle (RoFormer, 3.2)."""
    cos, sin = angles[: x.shape[-2]].unbind(-1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    angles: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)
        pairs = config.width // config.heads // 2
        speeds = 1000.0 ** (-torch.arange(pairs) / pairs)
        angles = torch.outer(torch.arange(config.context), speeds)
        self.register_buffer("angles", torch.stack([angles.cos(), angles.sin()], -1), False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(q, self.angles), rotate(k, self.angles), v, is_causal=True
        )
        projected: Tensor = self.project(mixed.transpose(1, 2).flatten(-2))
        return projected


class Block(nn.Module):
    """Attention, then a perceptron; each normalises its input and adds its result to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """A pre-norm, decoder-only transformer over bytes."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.tokens.weight, std=0.5)
        # An untrained model should find every byte about equally likely: a loss of ln 256 = 5.545.
        nn.init.normal_(self.head.weight, std=0.015)
        for name, weight in self.blocks.named_parameters():
            if weight.dim() == 2:
                # Every block adds twice to the residual stream: this keeps the stream's variance
                # independent of the depth (GPT-2, section 2.3).
                adds = name.endswith(("project.weight", "mlp.2.weight"))
                depth = math.sqrt(2 * self.config.layers) if adds else 1
                nn.init.normal_(weight, std=1 / math.sqrt(self.config.width) / depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict each next byte.

        Args:
            tokens: Bytes as int64, of shape (batch, length), with length up to the context.

        Returns:
            Logits of shape (batch, length, 256).
        """
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens))))
        return logits

    @torch.no_grad()
    def generate(
        self, prompt: bytes, length: int, temperature: float = 0.7, seed: int = 0
    ) -> bytes:
        """Continue `prompt` by `length` sampled bytes."""
        device = self.tokens.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        text = torch.tensor([list(prompt)], device=device)
        for _ in range(length):
            logits = self(text[:, -self.config.context :])[:, -1]
            chances = F.softmax(logits / temperature, dim=-1)
            text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)], dim=1)
        return bytes(text[0, len(prompt) :].tolist())


def nats_per_byte(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a prediction.

    Args:
        logits: Of shape (batch, length, 256).
        targets: The bytes that came, as int64 of shape (batch, length).
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
