"""A step that is only gone through tells what a real one has in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy import ConfigError
from offload_strategy.activations.fake_tensor_estimate import estimate_memory
from tests.activations.zoo import batch, build
from tests.training import assert_same_bits, weights

ROWS, WIDTH = 8, 256
ONE = ROWS * WIDTH * 4


class Chain(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sum()


def estimated(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    options = {"min_size": None, "gradients": 1, **options}
    named = options.pop("named", {})
    return estimate_memory(model, inputs, named, **options)


def test_what_is_saved_stays_unless_it_leaves() -> None:
    x = torch.empty(ROWS, WIDTH)
    shallow, deep = Chain(5), Chain(15)
    kept = estimated(deep, x).peak_bytes - estimated(shallow, x).peak_bytes
    assert kept == 10 * ONE
    left = estimated(deep, x, min_size=1)
    assert left.peak_bytes == estimated(shallow, x, min_size=1).peak_bytes
    assert left.saved_bytes == 15 * ONE


def test_gradients_stay_unless_updates_use_them_up() -> None:
    x, model, each = torch.empty(ROWS, WIDTH), Chain(12), WIDTH * WIDTH * 4
    all_of_them = estimated(model, x, min_size=1, gradients=None).peak_bytes
    two_of_them = estimated(model, x, min_size=1, gradients=1).peak_bytes  # one, and the next
    assert all_of_them - two_of_them == pytest.approx(10 * each, rel=0.02)


@pytest.mark.parametrize("kind", ["GPT-2", "Llama", "T5", "BERT", "ViT", "LSTM"])
def test_any_model_is_gone_through_and_nothing_of_it_is_touched(kind: str) -> None:
    model = build(kind)
    before, state = weights(model), torch.get_rng_state()
    found = estimated(model, min_size=1, named=dict(batch(kind, 0)))
    assert found.saved_bytes > 0
    assert_same_bits(weights(model), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_may_be_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Chain(3)
    real = estimated(Chain(3), torch.empty(ROWS, WIDTH))
    assert estimated(model, torch.empty(ROWS, WIDTH)) == real


def test_a_model_that_needs_values_is_told_so() -> None:
    class Chooses(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) if input.sum() > 0 else input

    with pytest.raises(ConfigError, match="without data"):
        estimated(Chooses(WIDTH, WIDTH), torch.empty(ROWS, WIDTH))


def test_a_model_without_a_loss_is_told_so() -> None:
    with pytest.raises(ConfigError, match="no tensor with a gradient"):
        estimated(nn.Flatten(), torch.empty(ROWS, WIDTH))
