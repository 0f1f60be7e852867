"""Memory and copies follow the device, not the host, which is far ahead and never waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from offload_strategy.io.backends import posix
from offload_strategy.units import MiB
from tests.accelerator.support import (
    DEVICE,
    TIERS,
    Deep,
    delays,
    device_module,
    loss_of,
    make,
    needs_accelerator,
    peaks,
    sleep,
)
from tests.paced import PacedBackend
from tests.training import attached, settings

pytestmark = needs_accelerator

LAYERS = 40
SAVED = LAYERS * 4 * MiB
STEPS = 4
#: Keeps the device about 300 ms behind the host.
BEHIND = 600_000_000


class Disk(PacedBackend):
    """Reads and writes a gigabyte in a second."""

    def __init__(self, **options: Any) -> None:
        super().__init__(read=1e9, write=1e9, **options)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in memory where there is one, so that no disk is slower than that."""
    monkeypatch.setattr(posix, "PosixBackend", Disk)
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


def run(
    engine: OffloadEngine | None, cycles: int = 0
) -> tuple[torch.Tensor, list[int], list[int], list[str]]:
    """The gradient; the bytes at the begin of each step and on top; what the last one waits for."""
    model = Deep(LAYERS, cycles).to(DEVICE)
    if engine is not None:
        engine.attach(model)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 20, generator=generator).to(DEVICE).requires_grad_()
    begins: list[int] = []
    waits: list[str] = []

    def step(_: int) -> None:
        begins.append(device_module.memory_allocated())
        waiting_calls()
        sleep(BEHIND)
        x.grad = None
        model(x).sum().backward()
        waits[:] = waiting_calls()

    highest = peaks(step, STEPS)
    assert x.grad is not None
    beyond = [peak - begin for peak, begin in zip(highest, begins, strict=True)]
    return x.grad.cpu(), begins, beyond, waits


def waiting_calls() -> dict[str, int]:
    """Of a simulated device: what waited for it and what pinned memory since the last call."""
    counts = device_module.counts(reset=True) if DEVICE == "sim" else {}
    return {name: n for name, n in counts.items() if name.startswith(("sync:", "pinned:"))}


def config(disk: Path, tiers: str, **activations: Any) -> dict[str, Any]:
    found = settings(disk, **TIERS[tiers], optimizer={"enabled": False})
    found["activations"], found["mode"] = activations, "always"
    found["memory"] = {"pinned": "1GiB"}
    found["tiers"][-1]["capacity"] = "4GiB"
    return found


@pytest.mark.parametrize("tiers", TIERS)
def test_memory_is_freed_although_the_device_is_behind(disk: Path, tiers: str) -> None:
    expected, plain_begins, plain_peaks, _ = run(None)
    with OffloadEngine(config(disk, tiers, budget="100%")) as engine:
        got, begins, taken, waits = run(engine)
        assert engine.metrics()["offload/device/peak_bytes"] > 0
    assert torch.equal(got, expected)
    assert min(plain_peaks) >= SAVED
    assert max(taken[1:]) <= 0.35 * SAVED, [peak // MiB for peak in taken]
    assert begins[1:] == plain_begins[1:], "nothing is kept from one step to the next"
    if tiers == "host memory":
        assert waits == [], "a steady step neither waits for the device nor pins memory"


@pytest.mark.parametrize("tiers", ["disk", "both", "host memory"])
def test_the_defaults_free_memory_although_the_device_is_behind(disk: Path, tiers: str) -> None:
    """`activations.budget: auto`; what leaves can be hidden, as each layer computes for 20 ms."""
    expected, plain_begins, _, _ = run(None)
    options = config(disk, "host memory" if tiers == "both" else tiers)
    if tiers == "both":
        options["tiers"][0]["capacity"] = "48MiB"
    with delays(1, 2500, 2500), OffloadEngine(options) as engine:
        got, begins, taken, _ = run(engine, cycles=40_000_000)
    assert torch.equal(got, expected)
    assert begins[1:] == plain_begins[1:], "nothing is kept from one step to the next"
    told = f"{tiers}: peaks of {[peak // MiB for peak in taken]} of {SAVED // MiB} MiB"
    # Not the largest: beside other work, a step keeps what it could not write in time.
    assert min(taken[1:]) <= 0.35 * SAVED, told


def counted(engine: OffloadEngine | None, scaled: bool) -> dict[str, int]:
    """Synchronising calls and registrations of host memory in the last step, by any thread."""
    model = make(32, 2)
    optimizer = attached(engine, model, AdamW(model.parameters(), 1e-3, foreach=True))
    scaler = torch.amp.GradScaler(DEVICE, enabled=scaled)
    for step in range(8):
        waiting_calls()
        loss = loss_of(model, step, rows=2, length=16)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found = waiting_calls()
        torch.accelerator.synchronize()
    return found


@pytest.mark.skipif(DEVICE != "sim", reason="needs the simulated accelerator")
@pytest.mark.parametrize("scaled", [False, True], ids=["", "GradScaler"])
@pytest.mark.parametrize("overlap", [None, "off", "commit", "eager"])
def test_a_steady_step_does_not_wait(disk: Path, overlap: str | None, scaled: bool) -> None:
    if scaled and overlap == "eager":
        pytest.skip("an update during backward cannot be scaled after it")
    expected = counted(None, scaled)
    section = {"enabled": False} if overlap is None else {"overlap": overlap}
    config = settings(disk, "1GiB", optimizer=section, memory={"pinned": "1GiB"})
    with OffloadEngine(config) as engine:
        got = counted(engine, scaled)
    ours = {name: number - expected.get(name, 0) for name, number in got.items()}
    ours = {name: number for name, number in ours.items() if number > 0}
    # `commit` reads what its comparisons found, and the factor by which gradients were scaled.
    allowed = 1 + scaled if overlap == "commit" else 0
    assert sum(ours.values()) <= allowed, ours
