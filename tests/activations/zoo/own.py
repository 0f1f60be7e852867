"""Small models of our own, of the kinds that transformers does not have; each returns its loss.

They know `gradient_checkpointing_enable` with the signature of transformers' models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Checkpointable(nn.Module):
    """A model that runs its blocks as regions, which checkpointing may recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.use_reentrant: bool | None = None

    def gradient_checkpointing_enable(self, options: dict[str, bool]) -> None:
        self.use_reentrant = options["use_reentrant"]

    def region(self, block: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        if self.use_reentrant is None:
            return block(*inputs)
        return checkpoint(block, *inputs, use_reentrant=self.use_reentrant)


# ---------------------------------------------------------------------- ResNet
class Residual(nn.Module):
    """Two convolutions with batch norm, in-place activations, and a short cut around them."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.short_cut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.short_cut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu_(self.body(x) + self.short_cut(x))


class ResNet(Checkpointable):
    """He et al., Deep residual learning: a stem, residual blocks, and a classifier."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.blocks = nn.ModuleList(
            [Residual(width, width, 1), Residual(width, 2 * width, 2)],
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = self.region(block, x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


# ---------------------------------------------------------------------- LSTM
class LSTM(Checkpointable):
    """A language model of two recurrent layers, with dropout and the head tied to the embedding."""

    def __init__(self, vocabulary: int = 64, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([nn.LSTM(width, width, batch_first=True) for _ in range(2)])
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x, _ = self.region(layer, self.dropout(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


# ---------------------------------------------------------------------- UNet
def sinusoids(times: torch.Tensor, width: int) -> torch.Tensor:
    """The embedding of diffusion times, shape (batch, width)."""
    frequencies = torch.exp(torch.arange(width // 2) * (-math.log(1000.0) / (width // 2)))
    angles = times[:, None] * 1000.0 * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Level(nn.Module):
    """A residual block of a UNet, which is told the time."""

    def __init__(self, width_in: int, width: int, time_width: int) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.GroupNorm(4, width_in), nn.GroupNorm(4, width)
        self.conv_in = nn.Conv2d(width_in, width, 3, padding=1)
        self.conv_out = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(time_width, width)
        self.dropout = nn.Dropout(0.1)
        self.short_cut = nn.Conv2d(width_in, width, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.conv_in(F.silu(self.norm_in(x))) + self.time(time)[:, :, None, None]
        return self.short_cut(x) + self.conv_out(self.dropout(F.silu(self.norm_out(h))))


class UNet(Checkpointable):
    """Ho et al., Denoising diffusion: down, attention, up again with skips; says the noise."""

    def __init__(self, width: int = 8, time_width: int = 16) -> None:
        super().__init__()
        self.time_width = time_width
        self.time = nn.Sequential(nn.Linear(time_width, time_width), nn.SiLU())
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            [Level(width, width, time_width), Level(width, 2 * width, time_width)]
        )
        self.shrink = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.attention = nn.MultiheadAttention(2 * width, 2, batch_first=True)
        self.grow = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up = Level(2 * width, width, time_width)
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return x + mixed.transpose(1, 2).reshape(x.shape)

    def forward(
        self, images: torch.Tensor, noise: torch.Tensor, times: torch.Tensor
    ) -> torch.Tensor:
        time = self.time(sinusoids(times, self.time_width))
        share = times[:, None, None, None]
        skip = self.region(self.down[0], self.stem((1 - share) * images + share * noise), time)
        x = self.region(self.down[1], self.shrink(skip), time)
        x = self.grow(self.region(self.middle, x))
        x = self.region(self.up, torch.cat([x, skip], dim=1), time)
        return F.mse_loss(self.head(x), noise)
