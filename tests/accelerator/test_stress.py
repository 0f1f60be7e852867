"""Copies and kernels that are late at random, and buffers that are few: many steps, the same bits.

What lies in memory that was freed too early is overwritten meanwhile, so that a stream that does
not wait for another shows in the numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from offload_strategy.store.copy_engine import CopyEngine
from offload_strategy.torch_support.accelerator import using_stream
from tests.accelerator.support import (
    DEVICE,
    batch,
    device_module,
    loss_of,
    make,
    needs_accelerator,
    new_stream,
    sleep,
    stir,
)
from tests.training import Numbers, attached, gradients, same_with_and_without, settings, weights

pytestmark = needs_accelerator

#: A device counts in cycles: about 0.2 ms at most.
_CYCLES = 400_000
STEPS = 1000 if DEVICE == "cuda" else 20


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every third copy begins late."""
    dice = random.Random(0)
    out, back = CopyEngine.copy_out, CopyEngine.load

    def lag(stream: torch.Stream) -> None:
        if dice.random() < 0.33:
            with using_stream(stream):
                sleep(dice.randrange(_CYCLES))

    def copy_out(engine: CopyEngine, *args: Any) -> None:
        lag(engine._copying(engine._compute())[0])
        out(engine, *args)

    def load(engine: CopyEngine, *args: Any) -> Any:
        lag(engine._copying(engine._compute())[1])
        return back(engine, *args)

    monkeypatch.setattr(CopyEngine, "copy_out", copy_out)
    monkeypatch.setattr(CopyEngine, "load", load)
    yield
    torch.accelerator.synchronize()


def train(engine: OffloadEngine | None) -> list[Numbers]:
    """Losses of each step, and the weights after every hundredth."""
    dice = random.Random(1)
    model = make(32, 2)
    optimizer = attached(engine, model, AdamW(model.parameters(), 1e-3))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):  # between the layers, wherever that is
            module.register_forward_hook(
                lambda *_: sleep(dice.randrange(_CYCLES) if dice.random() < 0.1 else 1)
            )
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = loss_of(model, step, rows=2, length=16)
        if step % 5 == 0:
            stir()
        loss.backward()
        if step % 7 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        numbers = {"loss": loss.detach()}
        if step % 20 == 19:
            numbers |= weights(model)
        found.append(numbers)
    return found


@pytest.mark.parametrize("overlap", ["commit", "off"])
@pytest.mark.parametrize("host", [None, "64KiB"], ids=["disk", "little host memory"])
def test_many_steps_are_the_same(
    disk: Path, late_copies: None, host: str | None, overlap: str
) -> None:
    config = settings(disk, host, optimizer={"overlap": overlap}, memory={"pinned": "256KiB"})
    figures = same_with_and_without(train, config)
    assert figures["offload/activations/written_bytes"] > 0


@pytest.mark.parametrize("priority", [-1, 0])
def test_two_streams_of_the_users_are_the_same(
    disk: Path, late_copies: None, priority: int
) -> None:
    """Forward on one, backward on another, as pipelines do."""

    def run(engine: OffloadEngine | None) -> list[Numbers]:
        model = make(32, 2)
        if engine is not None:
            engine.attach(model)
        one, two = (new_stream(priority) for _ in range(2))
        found = []
        for step in range(50 if DEVICE == "cuda" else 10):
            torch.manual_seed(step)
            one.wait_stream(torch.accelerator.current_stream())
            with using_stream(one):
                inputs = batch(step, rows=2, length=16)
                loss = model(inputs).pow(2).mean()
            two.wait_stream(one)
            with using_stream(two):
                loss.backward()
            torch.accelerator.current_stream().wait_stream(two)
            found.append(gradients(model))
            torch.accelerator.synchronize()  # what the user's own streams need
            model.zero_grad()
        return found

    same_with_and_without(run, settings(disk, memory={"pinned": "256KiB"}))


def test_device_memory_does_not_grow(disk: Path, late_copies: None) -> None:
    config = settings(disk, memory={"pinned": "256KiB"})
    with OffloadEngine(config) as engine:
        model = make(32, 2)
        optimizer: Any = engine.attach(model, AdamW(model.parameters(), 1e-3))
        levels = []
        for step in range(30):
            loss_of(model, step, rows=2, length=16).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 9:
                engine._resources.store.wait_for_writes()
                torch.accelerator.synchronize()
                levels.append(device_module.memory_allocated(DEVICE))
        assert levels[2] <= levels[1] + (1 << 20)
