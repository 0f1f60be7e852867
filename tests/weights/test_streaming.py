"""Training with streamed weights: the same bits as without, in every combination of clients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy import OffloadEngine
from offload_strategy.weights import block_residency
from tests.activations.zoo import batch, build, loss_of
from tests.training import Numbers, assert_same_history, bits, gradients, in_turn, weights
from tests.weights.support import (
    OVERLAPS,
    away,
    compare,
    nearly_all_left,
    overlapping,
    pairs,
    streaming,
    train,
    zoo_loss,
)

MODELS = ["GPT-2", "Llama", "Mixtral", "T5", "ViT", "BERT", "ResNet", "LSTM"]


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize(
    ("kind", "overlap", "activations"),
    in_turn(MODELS, [*OVERLAPS, "in memory"], [True, False, False]),
)
def test_the_bits_are_the_same(disk: Path, kind: str, overlap: str, activations: bool) -> None:
    def use(model: Any, optimizer: Any) -> list[Numbers]:
        # Eager updates have used gradients up before anybody can look.
        look = {} if overlap == "eager" else {"look": gradients}
        return train(model, optimizer, 4, loss_of=zoo_loss(kind), **look)

    sections = {"activations": {"enabled": activations}, **overlapping(overlap)}
    compare(disk, use, lambda: build(kind), fused, **sections)


@pytest.mark.parametrize("overlap", ["commit", "eager"])
def test_most_weights_are_away_between_steps_also_with_accumulation(
    disk: Path, overlap: str
) -> None:
    def accumulate(engine: OffloadEngine | None) -> list[Numbers]:
        model = build("Llama")
        optimizer: Any = fused(model) if engine is None else engine.attach(model, fused(model))
        history = []
        for number in range(12):
            if engine is not None:
                engine.microbatch(number % 3, last=number % 3 == 2)
            torch.manual_seed(number)
            loss = loss_of(model, batch("Llama", number))
            loss.backward()
            history.append({"loss": loss.detach().clone()})
            del loss
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
                assert engine is None or nearly_all_left(model)
        return [*history, weights(model)]

    with streaming(disk, **overlapping(overlap)) as engine:
        got = accumulate(engine)
    assert_same_history(got, accumulate(None))


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


class Subclass(torch.Tensor):
    """Of a user."""


LOOKS: dict[str, Callable[[nn.Parameter], object]] = {
    "repr": repr,
    "format": lambda p: f"{p} {p.sum():.3f} {p.shape}",
    "array": lambda p: p.detach().numpy().tobytes(),
    "sum": lambda p: float(p.sum()),
    "item": lambda p: p.reshape(-1)[0].item(),
    "finite": lambda p: bool(torch.isfinite(p).all()),
    "rows": lambda p: [bits(row) for row in p],
    "stacked": lambda p: bits(torch.stack([p, p * 2])),
    "type": lambda p: (p.type(), p.is_leaf, p.is_cpu, p.device, p.layout, p.nbytes, p.data.shape),
    "form": lambda p: (p.stride(), p.is_contiguous(), p.storage_offset(), p.dim_order()),
    "storage": lambda p: p.untyped_storage().nbytes(),
    "class": lambda p: (isinstance(p, nn.Parameter), isinstance(p, torch.Tensor), bool(p.grad)),
    "new": lambda p: (p.new_zeros(2).dtype, torch.empty_like(p).shape, type(torch.zeros_like(p))),
    "to": lambda p: (type(p.to(torch.float64)), bits(p.double()), bits(p.cpu()), p.cpu() is p),
    "clone": lambda p: (type(p.clone()), bits(p.clone()), type(p.detach()), type(p.data)),
    "hash": lambda p: (p in {p: 1}, {p: 1}[p], any(p is q for q in [p])),
    "as another class": lambda p: bits(p.as_subclass(Subclass).as_subclass(torch.Tensor)),
    "wrapped again": lambda p: (type(nn.Parameter(p)), bits(nn.Parameter(p, False))),
    "detached in place": lambda p: bits(p.detach().detach_()),
}  # fmt: skip


def test_looking_at_a_weight(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_residency, "_ACCESSED_BYTES", 0)  # each look brings each weight
    with ExitStack() as stack:
        seen = []
        for _, model, optimizer in pairs(disk, stack):
            train(model, optimizer)
            seen.append({"the model": repr(model)})
            for name, look in LOOKS.items():
                seen[-1] |= {f"{name} of {n}": look(p) for n, p in model.named_parameters()}
        assert seen[1] == seen[0]
