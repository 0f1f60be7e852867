"""Training with streamed weights: the same bits as without, in every combination of clients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_strategy import OffloadEngine
from tests.activations.zoo import batch, build, loss_of
from tests.training import Numbers, assert_same_history, gradients, in_turn, weights
from tests.weights.support import OVERLAPS, away, overlapping, streaming

MODELS = ["GPT-2", "Llama", "Mixtral", "T5", "ViT", "BERT", "ResNet", "LSTM"]


def train(
    kind: str,
    engine: OffloadEngine | None,
    *,
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
    for step in range(4):
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
def plain(kind: str, gradients_too: bool) -> list[Numbers]:
    """What training without offload gives."""
    return train(kind, None, gradients_too=gradients_too)


@pytest.mark.parametrize(
    ("kind", "overlap", "activations"),
    in_turn(MODELS, [*OVERLAPS, "in memory"], [True, False, False]),
)
def test_the_bits_are_the_same(disk: Path, kind: str, overlap: str, activations: bool) -> None:
    engine = streaming(disk, **overlapping(overlap), activations={"enabled": activations})
    seen = overlap != "eager"  # which has used gradients up before anybody can look
    assert_same_history(train(kind, engine, gradients_too=seen), plain(kind, seen))


@pytest.mark.parametrize("overlap", ["commit", "eager"])
def test_most_weights_are_away_between_steps_also_with_accumulation(
    disk: Path, overlap: str
) -> None:
    seen: list[int] = []
    engine = streaming(disk, **overlapping(overlap))
    got = train("Llama", engine, accumulate=3, look=lambda model: seen.append(len(away(model))))
    assert_same_history(got, train("Llama", None, accumulate=3))
    total = len(list(build("Llama").parameters()))
    assert all(count > total // 2 for count in seen), (seen, total)


def test_shapes_and_names_need_no_bytes(disk: Path) -> None:
    def look(model: Any) -> list[Any]:
        return [
            (name, isinstance(p, torch.nn.Parameter), p.shape, p.stride(), p.dtype, p.numel())
            for name, p in model.named_parameters()
        ] + [(p.is_contiguous(), len(p), p.requires_grad, p.grad) for p in model.parameters()]

    model = build("Llama")
    with streaming(disk) as engine:
        engine.attach(model)
        before = away(model)
        assert before
        assert look(model) == look(build("Llama"))
        assert away(model) == before
