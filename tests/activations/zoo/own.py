"""Small models of our own, of the kinds that transformers does not have; each returns its loss.

They know `gradient_checkpointing_enable` with the signature of transformers' models.
"""

from __future__ import annotations

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
