"""A part of a streamed model is trained: adapters, some layers, beside weights that are frozen."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload_strategy.weights.guarded_parameter import GuardedParameter
from tests.activations.zoo import batch, build, loss_of
from tests.training import (
    Numbers,
    assert_same_bits,
    assert_same_history,
    gradients,
    in_turn,
    weights,
)
from tests.weights.support import (
    OVERLAPS,
    Net,
    adamw,
    away,
    compare,
    compared,
    net,
    overlapping,
    same,
    streaming,
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


def adapted(kind: str, reentrant: bool | None = None) -> Any:
    """A model with adapters, the same every time."""
    model = build(kind, reentrant)
    torch.manual_seed(1)
    return get_peft_model(model, lora(kind)).train()


def adamw_of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-1)


def fit(model: Any, optimizer: Any, kind: str, steps: int = 3, **options: Any) -> list[Numbers]:
    return train(model, optimizer, steps, loss_of=zoo_loss(kind), **options)


# ---------------------------------------------------------------------- adapters
@pytest.mark.parametrize(
    ("kind", "overlap", "min_size", "reentrant", "activations"),
    in_turn(
        [*KINDS] * 4,
        [*OVERLAPS, "in memory"],
        SIZES * 2 + [1],
        [None, True, False],
        [True, False, False],
    ),
)
def test_adapters_train_the_same_and_are_merged_the_same(
    disk: Path, kind: str, overlap: str, min_size: int, reentrant: bool | None, activations: bool
) -> None:
    def make() -> Any:
        model = adapted(kind, reentrant)
        if reentrant is not None:
            model.enable_input_require_grads()
        return model

    def use(model: Any, optimizer: Any) -> list[Numbers]:
        history = fit(model, optimizer, kind)
        merged = model.merge_and_unload().eval()
        optimizer.zero_grad()
        with torch.no_grad():
            history.append({"loss": loss_of(merged, batch(kind, 7)).clone()})
        return [*history, weights(merged)]

    sections = {"activations": {"enabled": activations}, **overlapping(overlap)}
    parameters = {"enabled": True, "min_size": min_size}
    compare(disk, use, make, adamw_of_trained, **sections, parameters=parameters)


def test_a_merged_model_computes_when_its_adapters_are_gone(disk: Path) -> None:
    def merge(attach: Callable[..., Any]) -> list[Numbers]:
        model = adapted("GPT-2")
        optimizer = attach(model, adamw_of_trained(model))
        fit(model, optimizer, "GPT-2", steps=2)
        merged = model.merge_and_unload().eval()
        optimizer.zero_grad()
        del model, optimizer
        gc.collect()
        with torch.no_grad():
            return [{"loss": loss_of(merged, batch("GPT-2", 7)).clone()}]

    same(disk, merge)


@pytest.mark.parametrize(("kind", "overlap"), [("GPT-2", "commit"), ("Llama", "off")])
def test_adapters_that_come_when_the_base_is_streamed_already_and_are_saved(
    disk: Path, tmp_path: Path, kind: str, overlap: str
) -> None:
    def adapt(attach: Callable[..., Any]) -> list[Numbers]:
        base = build(kind)
        attach(base)
        torch.manual_seed(1)
        model: Any = get_peft_model(base, lora(kind)).train()
        history = fit(model, attach(None, adamw_of_trained(model)), kind, steps=3)
        model.save_pretrained(tmp_path / "adapters")
        loaded = PeftModel.from_pretrained(build(kind), str(tmp_path / "adapters"))
        assert_same_bits(weights(loaded), weights(model))
        return [*history, weights(model)]

    same(disk, adapt, **overlapping(overlap))


# ---------------------------------------------------------------------- parts


@pytest.mark.parametrize(("overlap", "kind", "first"), in_turn(OVERLAPS, KINDS, [0, 0, 1]))
@compared(lambda kind: build(kind), overlaps=[])
def test_layers_are_frozen_for_a_while(model, optimizer, kind, first):
    history = []
    for number in range(5):
        for name, parameter in model.named_parameters():
            if ".1." in name:
                parameter.requires_grad_(number // 2 % 2 == first)
        history += fit(model, optimizer, kind, 1, first=number)
    return history


# ---------------------------------------------------------------------- other weights
class Quantised(nn.Module):
    """A frozen layer whose weight is narrow, and a trained one beside it."""

    def __init__(self, dtype: torch.dtype, width: int = 8) -> None:
        super().__init__()
        wide = torch.randn(width, width)
        self.scale = nn.Parameter(wide.abs().amax(1, keepdim=True) / 127, requires_grad=False)
        narrow = wide / self.scale
        if dtype in (torch.uint8, torch.bool):
            narrow = narrow.relu()
        self.weight = nn.Parameter(narrow.round().to(dtype), requires_grad=False)
        self.delta = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = F.linear(x, self.weight.to(x.dtype) * self.scale)
        change: torch.Tensor = self.delta(x).tanh()
        return output + change


NARROW = [torch.int8, torch.bool, torch.int64, torch.bfloat16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@compared(lambda dtype: net(lambda: Net(lambda: Quantised(dtype))), adamw_of_trained)
def test_weights_that_are_not_of_floating_point_come_back_as_they_were(model, optimizer, dtype):
    names = [f"blocks.{number}.weight" for number in range(3)]
    history = train(model, optimizer)
    assert [model.get_parameter(name).dtype for name in names] == [dtype] * 3
    assert not away(model) or len(set(names) & set(away(model))) >= 2
    return history


class Tagged(nn.Parameter):
    """What libraries make of quantised weights: a class of its own, with attributes."""

    tag = ""


def tagged() -> Any:
    model = net()
    for block in model.blocks:
        block.up.weight = Tagged(block.up.weight.detach())
    for name, parameter in model.named_parameters():
        parameter.tag = name
    return model


@compared(tagged, overlaps=["commit", "eager"])
def test_parameters_keep_their_identity_and_what_was_hung_on_them(model, optimizer):
    """Those of other classes stay in memory, besides."""
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    history = train(model, optimizer)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert all(parameter.tag == name for name, parameter in model.named_parameters())
    assert all(type(block.up.weight) is Tagged for block in model.blocks)
    assert not {f"blocks.{number}.up.weight" for number in range(3)} & set(away(model))
    return history


def test_two_engines_in_turn_leave_plain_parameters(disk: Path) -> None:
    plain, model = net(), net()
    expected = train(plain, adamw(plain), 4)
    history, own = [], adamw(model)
    for number in range(2):
        with streaming(disk, optimizer={"enabled": False}) as engine:
            optimizer = engine.attach(model, own)
            assert any(type(p) is GuardedParameter for p in model.parameters())
            history += train(model, optimizer, 2, first=2 * number)
        assert all(type(p) is nn.Parameter for p in model.parameters())
    assert_same_history([*history, weights(model)], [*expected, weights(plain)])


# ---------------------------------------------------------------------- recomputed regions
class Product(nn.Module):
    """As `Conv1D` of GPT-2: autograd saves its weight as it is, and that of `Linear` transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight).tanh()


@pytest.mark.parametrize("trained", ["bias", "0.weight", "blocks.3"])
def test_frozen_weights_of_recomputed_blocks_are_there_in_backward(
    disk: Path, trained: str
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(Product(), Product()) for _ in range(4))
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(trained in name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    def use(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Numbers]:
        history = []
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.ones(2, 16, requires_grad=True)
            model(x).sum().backward()
            assert x.grad is not None
            history.append({"input": x.grad, **gradients(model)})
            optimizer.step()
        return history

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Model()

    parameters = {"enabled": True, "min_size": 1}
    compare(disk, use, make, adamw_of_trained, **overlapping("off"), parameters=parameters)
