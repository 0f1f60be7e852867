"""Checkpointed regions: their inputs leave, and what is computed again does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload_strategy import OffloadEngine
from tests.activations.support import compare, noise


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointed_regions_are_computed_again_as_before(
    engine: OffloadEngine, reentrant: bool
) -> None:
    torch.manual_seed(0)
    region = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.region, self.out = region, nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.region, x, use_reentrant=reentrant)
            return checkpoint(self.region, self.out(x).relu(), use_reentrant=reentrant).sum()

    model, x = Model(), noise(4, 8).requires_grad_()
    compare(engine, model, lambda: (model(x), x))
