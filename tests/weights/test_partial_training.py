"""A part of a streamed model is trained: adapters, some layers, beside weights that are frozen."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from tests.activations.support import noise
from tests.activations.test_recompute import WAYS
from tests.activations.zoo import batch, build, loss_of
from tests.training import Numbers, assert_same_bits, attached, gradients, in_turn, weights
from tests.weights.support import (
    OVERLAPS,
    Net,
    adamw_of_trained,
    away,
    compared,
    net,
    the_same,
    train,
    zoo_loss,
)

KINDS = ["GPT-2", "Llama"]
TARGETS = {"GPT-2": ["c_attn", "c_fc"], "Llama": ["q_proj", "v_proj", "down_proj"]}

#: With 1 KiB the adapters stay in memory, and of the frozen base all but norms and biases leaves.
SIZES = [1, 1024]


def lora(kind: str, **options: Any) -> LoraConfig:
    return LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=0.1,
        target_modules=TARGETS[kind],
        fan_in_fan_out=kind == "GPT-2",
        **options,
    )


def fit(model: Any, optimizer: Any, kind: str, steps: int = 3, **options: Any) -> list[Numbers]:
    return train(model, optimizer, steps, loss_of=zoo_loss(kind), **options)


# ---------------------------------------------------------------------- adapters
@pytest.mark.parametrize(
    ("kind", "overlap", "parameters", "reentrant", "activations"),
    in_turn(
        [*KINDS] * 4,
        [*OVERLAPS, "in memory"],
        [{"min_size": size} for size in SIZES * 2 + [1]],
        [None, True, False],
        [True, False, False],
    ),
)
@the_same
def test_adapters_train_the_same_and_are_merged_the_same(engine, kind, reentrant):
    """The merged model computes when the one with adapters is gone."""
    base = build(kind, reentrant)
    torch.manual_seed(1)
    model: Any = get_peft_model(base, lora(kind)).train()
    if reentrant is not None:
        model.enable_input_require_grads()
    optimizer = attached(engine, model, adamw_of_trained(model))
    assert engine is None or away(model)
    history = fit(model, optimizer, kind)
    merged = model.merge_and_unload().eval()
    optimizer.zero_grad()
    del base, model, optimizer
    gc.collect()
    with torch.no_grad():
        history.append({"loss": loss_of(merged, batch(kind, 7)).clone()})
    return history, merged


@pytest.mark.parametrize(("kind", "overlap"), [("GPT-2", "commit"), ("Llama", "off")])
@the_same
def test_adapters_that_come_when_the_base_is_streamed_already_and_are_saved(engine, kind, tmp_path):
    base = build(kind)
    if engine is not None:
        engine.attach(base)
    torch.manual_seed(1)
    model: Any = get_peft_model(base, lora(kind)).train()
    history = fit(model, attached(engine, None, adamw_of_trained(model)), kind)
    model.save_pretrained(tmp_path / "adapters")
    loaded = PeftModel.from_pretrained(build(kind), str(tmp_path / "adapters"))
    assert_same_bits(weights(loaded), weights(model))
    return history, model


# ---------------------------------------------------------------------- parts
@pytest.mark.parametrize(("overlap", "kind", "first"), in_turn(OVERLAPS, KINDS, [0, 0, 1]))
@compared(lambda kind: build(kind))
def test_layers_are_frozen_for_a_while(model, optimizer, kind, first):
    history = []
    for number in range(5):
        for name, parameter in model.named_parameters():
            if ".1." in name:
                parameter.requires_grad_(number // 2 % 2 == first)
        history += fit(model, optimizer, kind, 1, first=number)
    return history


class Product(nn.Module):
    """As `Conv1D` of GPT-2: autograd saves its weight as it is, and that of `Linear` transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight).tanh()


def _recomputed(trained: str) -> Any:
    def block() -> nn.Module:
        return nn.Sequential(Product(), Product())

    model = net(lambda: Net(block, around=WAYS["non-reentrant"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    return model


@pytest.mark.parametrize(("trained", "overlap"), in_turn(["bias", "0.weight", "blocks.2"], ["off"]))
@compared(_recomputed, adamw_of_trained)
def test_frozen_weights_of_recomputed_blocks_are_there_in_backward(model, optimizer):
    history = []
    for number in range(2):
        optimizer.zero_grad()
        x = noise(2, 8, seed=number).requires_grad_()
        model.features(x).sum().backward()
        history.append({"input": x.grad, **gradients(model)})
        optimizer.step()
    return history
