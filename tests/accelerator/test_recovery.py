"""Training goes on after what went wrong: out of memory, Ctrl-C, an error in a hook."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.units import PAGE_BYTES, MiB
from tests.accelerator.support import (
    DEVICE,
    device_module,
    loss_of,
    make,
    memory_beyond,
    needs_accelerator,
    train,
)
from tests.training import (
    Numbers,
    assert_same_history,
    attached,
    same_with_and_without,
    settings,
    weights,
)

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


def around(trouble: Callable[[nn.Module], None], engine: OffloadEngine | None) -> list[Numbers]:
    """Three steps, then trouble where there is an engine, and three more steps."""
    model = make()
    optimizer = attached(engine, model, AdamW(model.parameters(), 1e-3))
    found = train(model, optimizer, range(3))
    if engine is not None:
        trouble(model)
        model.zero_grad()
        gc.collect()
        device_module.empty_cache()
    return [*found, *train(model, optimizer, range(3, 6)), weights(model)]


@pytest.mark.parametrize("overlap", ["commit", "off"])
def test_out_of_memory_in_a_step_that_is_left_out(
    disk: Path, overlap: str, little_memory: None
) -> None:
    def trouble(model: nn.Module) -> None:
        with pytest.raises(torch.OutOfMemoryError):
            loss_of(model, 99, rows=256, length=4096).backward()

    config = settings(disk, optimizer={"overlap": overlap})
    same_with_and_without(partial(around, trouble), config)


@pytest.mark.parametrize(
    ("where", "error"), [("forward", KeyboardInterrupt), ("backward", Trouble)]
)
def test_an_error_in_the_middle_of_a_step(
    disk: Path, where: str, error: type[BaseException]
) -> None:
    def fail(*_: Any) -> None:
        raise error

    def trouble(model: Any) -> None:
        name = f"register_{'full_backward' if where == 'backward' else where}_hook"
        handle = getattr(model.blocks[1], name)(fail)
        with pytest.raises(error):
            loss_of(model, 99).backward()
        handle.remove()

    with OffloadEngine(settings(disk, optimizer={"overlap": "off"})) as engine:
        assert_same_history(around(trouble, engine), around(trouble, None))
        gc.collect()
        torch.accelerator.synchronize()
    assert engine.metrics()["offload/memory/pinned_bytes"] == 0


def test_pinned_memory_is_exactly_as_asked() -> None:
    """Torch's own allocator of pinned memory would round every size up to a power of two."""
    pool = BufferPool(16 * MiB)
    nbytes = 4 * MiB + PAGE_BYTES
    buffer = pool.acquire(nbytes, pinned=True)
    assert buffer is not None
    assert buffer.is_pinned()
    assert pool.usage().held_bytes == nbytes
    del buffer
    pool.close()
