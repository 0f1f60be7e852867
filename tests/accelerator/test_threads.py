"""Two models trained by two threads at a time: the same bits, whatever the delays.

Each model is on a device of its own where there are two, so that autograd has two threads as well.
Each thread computes on a stream of its own, offloads to a little host memory and to a disk, and
updates during backward. By seed, both models have one engine or two, and other delays.

``make stress`` runs a thousand seeds.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from offload_strategy.torch_support.accelerator import using_stream
from tests.accelerator.support import (
    DEVICE,
    Transformer,
    device_module,
    needs_accelerator,
    sleep,
)
from tests.training import Numbers, assert_same_history, settings, weights

pytestmark = needs_accelerator

SEEDS = int(os.environ.get("STRESS_SEEDS", "20"))
#: Seeds of one test.
TOGETHER = 5
STEPS = 3
OVERLAPS = ["commit", "eager", "off"]


def make(number: int) -> nn.Module:
    """A model without random numbers, which threads would draw in any order."""
    torch.manual_seed(number)
    index = number % torch.accelerator.device_count()
    model = Transformer(16, 2)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.to(f"{DEVICE}:{index}")


def train(model: nn.Module, optimizer: Any, seed: int, found: list[Numbers]) -> None:
    device = next(model.parameters()).device
    dice = random.Random(seed)
    torch.accelerator.set_device_index(device)
    with using_stream(torch.Stream(device)):
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(2, 16, 32, generator=generator).to(device)
            loss = model(inputs).pow(2).mean()
            sleep(dice.randrange(4_000_000))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append({"loss": loss.detach()})
        found.append(weights(model))
        torch.accelerator.current_stream(device).synchronize()


def train_both(
    disk: Path | None, seed: int, *, overlap: str = "off", engines: int = 2
) -> list[list[Numbers]]:
    """Losses and weights of two models; without a disk, of plain training, one after another."""
    models = [make(number) for number in range(2)]
    optimizers: list[Any] = [AdamW(model.parameters(), 1e-3) for model in models]
    found: list[list[Numbers]] = [[], []]
    torch.accelerator.synchronize()
    if disk is None:
        for model, optimizer, numbers in zip(models, optimizers, found, strict=True):
            train(model, optimizer, seed, numbers)
        torch.accelerator.set_device_index(0)  # other tests run in this thread
        return found
    section = {"overlap": overlap}
    config = settings(disk, "64KiB", optimizer=section, memory={"pinned": "1MiB"})
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(OffloadEngine(config)) for _ in range(engines)]
        for number, model in enumerate(models):
            engine = opened[number % engines]
            optimizers[number] = engine.attach(model, optimizers[number])
        errors: list[BaseException] = []
        begin = threading.Barrier(2)

        def work(number: int) -> None:
            begin.wait()
            try:
                train(models[number], optimizers[number], seed + number, found[number])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        for engine in opened:
            figures = engine.metrics()
            assert figures["offload/activations/step_left_bytes"] > 0
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[Numbers]]:
    return train_both(None, 0)


@contextlib.contextmanager
def delays(seed: int) -> Iterator[None]:
    """Of a simulated device."""
    if DEVICE != "sim":
        yield
        return
    device_module.set_seed(seed)
    device_module.set_delays(*(random.Random(seed).randrange(200) for _ in range(2)))
    try:
        yield
    finally:
        device_module.set_delays(0, 0)


@pytest.mark.parametrize("first", range(0, SEEDS, TOGETHER))
def test_two_threads_train_the_same(disk: Path, expected: list[list[Numbers]], first: int) -> None:
    for seed in range(first, min(first + TOGETHER, SEEDS)):
        with delays(seed):
            overlap = OVERLAPS[seed // 2 % 3]
            got = train_both(disk, seed, overlap=overlap, engines=1 + seed % 2)
            torch.accelerator.synchronize()
        try:
            for one, other in zip(got, expected, strict=True):
                assert_same_history(one, other)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
