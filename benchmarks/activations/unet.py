"""A U-Net: what its first layers save is used last, and skips reach over all that lies between."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

#: Tokens lie in rows of so many, and each is so many pixels wide and high.
_ROW, _PIXELS = 32, 8


class _Twice(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.GroupNorm(8, outside),
            nn.SiLU(),
            nn.Conv2d(outside, outside, 3, padding=1),
            nn.GroupNorm(8, outside),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Predicts the tokens of a picture that is made of them.

    Args:
        vocabulary: tokens to choose from.
        width: channels of the first level; each next one has twice as many.
        levels: of halved resolution.
    """

    def __init__(self, vocabulary: int, width: int, levels: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.embedding = nn.Embedding(vocabulary, width)
        self.down = nn.ModuleList(
            _Twice(widths[max(0, level - 1)], widths[level]) for level in range(levels + 1)
        )
        self.up = nn.ModuleList(
            _Twice(widths[level + 1] + widths[level], widths[level]) for level in range(levels)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """The loss of tokens of (batch, sequence)."""
        batch, sequence = input_ids.shape
        x = self.embedding(input_ids).view(batch, sequence // _ROW, _ROW, -1).permute(0, 3, 1, 2)
        x = nn.functional.interpolate(x, scale_factor=_PIXELS)
        skips = []
        for level, block in enumerate(self.down):
            x = block(nn.functional.avg_pool2d(x, 2) if level else x)
            skips.append(x)
        for level in reversed(range(len(self.up))):
            x = nn.functional.interpolate(x, scale_factor=2)
            x = self.up[level](torch.cat([x, skips[level]], dim=1))
        x = nn.functional.avg_pool2d(x, _PIXELS).permute(0, 2, 3, 1).reshape(batch, sequence, -1)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss)
