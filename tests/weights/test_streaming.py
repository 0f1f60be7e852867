"""Training with streamed weights: the same bits as without, in every combination of clients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_strategy import OffloadEngine
from offload_strategy.weights.guarded_parameter import GuardedParameter
from tests.activations.zoo import batch, build, loss_of
from tests.training import Numbers, assert_same_history, gradients, settings, weights

MODELS = ["GPT-2", "Llama", "Mixtral", "T5", "ViT", "BERT", "ResNet", "LSTM"]


def train(
    kind: str,
    engine: OffloadEngine | None,
    *,
    steps: int = 10,
    accumulate: int = 1,
    gradients_too: bool = False,
    look: Callable[[Any], None] = lambda model: None,
) -> list[Numbers]:
    """Losses of each step, gradients if they are wanted, and the weights after the last."""
    model = build(kind)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if engine is not None:
        optimizer = engine.attach(model, optimizer)
    history = []
    for step in range(steps):
        torch.manual_seed(1000 + step)
        for index in range(accumulate):
            if engine is not None:
                engine.microbatch(index, last=index == accumulate - 1)
            loss = loss_of(model, batch(kind, accumulate * step + index))
            loss.backward()
            history.append({"loss": loss.detach().clone()})
            if gradients_too:
                history[-1].update(gradients(model))
            del loss
        optimizer.step()
        optimizer.zero_grad()
        look(model)
    if engine is not None:
        engine.close()
    history.append(weights(model))
    return history


@cache
def plain(kind: str) -> list[Numbers]:
    """What training without offload gives, with the gradients of every step."""
    return train(kind, None, gradients_too=True)


def plain_without_gradients(kind: str) -> list[Numbers]:
    return [
        {name: value for name, value in numbers.items() if not name.startswith("grad ")}
        for numbers in plain(kind)
    ]


def streaming(disk: Path, **sections: Any) -> OffloadEngine:
    return OffloadEngine(
        settings(disk, **{"parameters": {"enabled": True, "min_size": 1}, **sections})
    )


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
@pytest.mark.parametrize("activations", [True, False], ids=["activations", "none"])
def test_the_bits_are_the_same(disk: Path, kind: str, overlap: str, activations: bool) -> None:
    engine = streaming(disk, optimizer={"overlap": overlap}, activations={"enabled": activations})
    seen = overlap != "eager"  # which has used gradients up before anybody can look
    expected = plain(kind) if seen else plain_without_gradients(kind)
    assert_same_history(train(kind, engine, gradients_too=seen), expected)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("activations", [True, False], ids=["activations", "none"])
def test_with_an_optimizer_in_memory(disk: Path, kind: str, activations: bool) -> None:
    engine = streaming(disk, optimizer={"enabled": False}, activations={"enabled": activations})
    assert_same_history(train(kind, engine, gradients_too=True), plain(kind))


@pytest.mark.parametrize("overlap", ["commit", "eager"])
def test_with_accumulation(disk: Path, overlap: str) -> None:
    engine = streaming(disk, optimizer={"overlap": overlap})
    expected = train("Llama", None, accumulate=3)
    assert_same_history(train("Llama", engine, accumulate=3), expected)


def away(model: Any) -> list[str]:
    return [
        name
        for name, parameter in model.named_parameters()
        if type(parameter) is GuardedParameter and not parameter_is_here(parameter)
    ]


def parameter_is_here(parameter: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return bool(parameter.untyped_storage().nbytes() > parameter.element_size())


def test_most_weights_are_away_between_steps(disk: Path) -> None:
    seen: list[int] = []
    train("Llama", streaming(disk), look=lambda model: seen.append(len(away(model))))
    total = len(list(build("Llama").parameters()))
    assert all(count > total // 2 for count in seen), (seen, total)


def test_shapes_and_names_need_no_bytes(disk: Path) -> None:
    model, plain = build("Llama"), build("Llama")
    with streaming(disk) as engine:
        engine.attach(model)
        before = away(model)
        assert before
        for (name, parameter), (other, expected) in itertools.zip_longest(
            model.named_parameters(), plain.named_parameters()
        ):
            assert name == other
            assert isinstance(parameter, torch.nn.Parameter)
            assert parameter.shape == expected.shape
            assert parameter.stride() == expected.stride()
            assert parameter.is_contiguous()
            assert parameter.dtype == expected.dtype
            assert parameter.numel() == expected.numel()
            assert parameter.requires_grad
            assert parameter.grad is None
            assert len(parameter) == len(expected)
        assert sum(p.numel() for p in model.parameters()) == sum(
            p.numel() for p in plain.parameters()
        )
        assert away(model) == before
