"""Whole models under other conditions: races with the disk, host memory, checkpoints, autocast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.activations.zoo import ZOO, Batch, batch, build, loss_of
from tests.activations.zoo.training import SCHEDULES, train
from tests.training import (
    Numbers,
    activations_only,
    assert_same_history,
    moved,
    on_disk,
    saved_storages,
)

pytest.importorskip("transformers")


def run(kind: str, model: nn.Module, **options: Any) -> list[Numbers]:
    return train(model, lambda number: batch(kind, number), **options)


@pytest.mark.parametrize("kind", ZOO)
def test_the_same_without_waiting_for_the_disk(kind: str, disk: Path) -> None:
    schedule = SCHEDULES["three forwards first"]
    expected = run(kind, build(kind), schedule=schedule)
    model = build(kind)
    with activations_only(disk, prefetch=0, budget="60%") as engine:
        engine.attach(model)
        assert_same_history(run(kind, model, schedule=schedule), expected)
        assert moved(engine) + moved(engine, verb="forwarded") > 0


@pytest.mark.parametrize("kind", ZOO)
def test_the_same_with_host_memory_alone(kind: str) -> None:
    expected = run(kind, build(kind))
    model = build(kind)
    with activations_only(None, host="64MiB", budget="100%") as engine:
        engine.attach(model)
        held: list[float] = []

        def between() -> None:
            on_disk(engine)
            held.append(engine.metrics()["offload/tier/host/used_bytes"])

        assert_same_history(run(kind, model, between=between), expected)
        assert min(held) > 0
        assert engine.metrics()["offload/tier/host/used_bytes"] == 0


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_with_checkpointing_less_leaves(kind: str, disk: Path, reentrant: bool) -> None:
    def bytes_that_leave(model: nn.Module) -> int:
        with activations_only(disk, budget="100%") as engine:
            engine.attach(model)
            run(kind, model, steps=1, between=lambda: on_disk(engine))
            return moved(engine)

    assert 0 < bytes_that_leave(build(kind, reentrant)) < bytes_that_leave(build(kind))


def _in_bfloat16(model: nn.Module, data: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, data)


@pytest.mark.parametrize("kind", ZOO)
def test_autocast_is_the_same_and_casts_of_weights_stay(kind: str, disk: Path) -> None:
    try:
        expected = run(kind, build(kind), steps=1, forward=_in_bfloat16)
    except RuntimeError as error:  # plain PyTorch, without this package
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip(f"oneDNN has no bfloat16 kernel for {kind} on this processor")
    model = build(kind)
    with activations_only(disk, budget="100%") as engine:
        engine.attach(model)
        got = run(kind, model, steps=1, forward=_in_bfloat16, between=lambda: on_disk(engine))
        assert_same_history(got, expected)
        left = moved(engine)

    model = build(kind)
    # Copies of weights are told by what they hold.
    casts = {bytes(p.detach().to(torch.bfloat16).untyped_storage()) for p in model.parameters()}
    torch.manual_seed(1000)
    saved = saved_storages(
        lambda: _in_bfloat16(model, batch(kind, 0)), [*model.parameters(), *model.buffers()]
    )
    of_weights = [storage for storage in saved if bytes(storage) in casts]
    assert of_weights
    others = sum(storage.nbytes() for storage in saved if storage not in of_weights)
    assert 0.97 * others < left <= others


@pytest.mark.parametrize("kind", ["UNet", "CLIP"])
def test_a_loss_outside_of_the_model_takes_part(kind: str, disk: Path) -> None:
    def outside(model: nn.Module, data: Batch) -> torch.Tensor:
        return loss_of(model, data).exp().sin()

    def inside(model: nn.Module, data: Batch) -> torch.Tensor:
        with engine.forward():
            return outside(model, data)

    expected = run(kind, build(kind), forward=outside)
    left = []
    for forward in (outside, inside):
        model = build(kind)
        with activations_only(disk, budget="100%") as engine:
            engine.attach(model)
            got = run(kind, model, forward=forward, between=lambda: on_disk(engine))
            assert_same_history(got, expected)
            left.append(moved(engine))
    assert left[1] == left[0] + 3 * 4  # one number in each step, which exp and sin both save
