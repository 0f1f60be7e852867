"""Training goes on after what went wrong: out of memory, Ctrl-C, an error in a hook."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from tests.accelerator.support import (
    DEVICE,
    device_module,
    loss_of,
    make,
    memory_beyond,
    needs_accelerator,
)
from tests.training import Numbers, assert_same_history, on_disk, settings, weights

pytestmark = needs_accelerator


#: Bytes beyond those in use.
LITTLE = 1 << (30 if DEVICE == "cuda" else 26)


class Trouble(Exception):
    """What a test raises."""


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Much less than the batch takes that does not fit."""
    with memory_beyond(LITTLE):
        yield


def steps(model: nn.Module, optimizer: Any, first: int, last: int, found: list[Numbers]) -> None:
    for step in range(first, last):
        torch.manual_seed(step)
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": loss.detach()})
        del loss


def whole() -> list[Numbers]:
    model = make()
    found: list[Numbers] = []
    steps(model, AdamW(model.parameters(), 1e-3), 0, 6, found)
    return [*found, weights(model)]


@pytest.mark.parametrize("overlap", ["commit", "off"])
def test_out_of_memory_in_a_step_that_is_left_out(
    disk: Path, overlap: str, little_memory: None
) -> None:
    expected = whole()
    with OffloadEngine(settings(disk, optimizer={"overlap": overlap})) as engine:
        model = make()
        optimizer: Any = engine.attach(model, AdamW(model.parameters(), 1e-3))
        got: list[Numbers] = []
        steps(model, optimizer, 0, 3, got)
        with pytest.raises(torch.OutOfMemoryError):
            loss_of(model, 99, rows=256, length=4096).backward()
        model.zero_grad()
        gc.collect()
        device_module.empty_cache()
        steps(model, optimizer, 3, 6, got)
        assert_same_history([*got, weights(model)], expected)


@pytest.mark.parametrize("error", [Trouble, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_the_middle_of_a_step(
    disk: Path, where: str, error: type[BaseException]
) -> None:
    expected = whole()

    def fail(*_: Any) -> None:
        raise error

    with OffloadEngine(settings(disk, optimizer={"overlap": "off"})) as engine:
        model = make()
        optimizer: Any = engine.attach(model, AdamW(model.parameters(), 1e-3))
        got: list[Numbers] = []
        steps(model, optimizer, 0, 3, got)
        block: Any = model.blocks[1]  # type: ignore[index]
        if where == "forward":
            handle = block.register_forward_hook(fail)
        else:
            handle = block.register_full_backward_hook(fail)
        with pytest.raises(error):
            loss_of(model, 99).backward()
        handle.remove()
        model.zero_grad()
        steps(model, optimizer, 3, 6, got)
        assert_same_history([*got, weights(model)], expected)
        gc.collect()
        torch.accelerator.synchronize()
    assert engine.metrics()["offload/memory/pinned_bytes"] == 0


def test_pinned_memory_is_exactly_as_asked(disk: Path) -> None:
    """Torch's own allocator of pinned memory would round every size up to a power of two."""
    with OffloadEngine(settings(disk, memory={"pinned": "3MiB"})) as engine:
        model = make()
        engine.attach(model)
        for step in range(3):
            loss = loss_of(model, step)
            on_disk(engine)  # a late write may hold a buffer while a load exceeds the budget
            loss.backward()
        figures = engine.metrics()
        assert 0 < figures["offload/memory/pinned_peak_bytes"] <= 3 << 20
