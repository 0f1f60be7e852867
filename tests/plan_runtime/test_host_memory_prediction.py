"""The forecast of memory: every part is counted once, and buffers within what is allowed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.plan_runtime.host_memory_prediction import (
    HostMemoryPrediction,
    StreamedModelSizes,
    predict_host_memory,
)
from offload_strategy.units import GiB, MiB
from tests.training import settings
from tests.weights.test_streaming import streaming

SHAPES = StreamedModelSizes(
    blocks=(60 * MiB, 100 * MiB, 100 * MiB, 80 * MiB),
    trained=340 * MiB,
    largest=50 * MiB,
    subgroup=16 * MiB,
    states_share=2.0,
)


def forecast(shapes: StreamedModelSizes = SHAPES, **options: Any) -> HostMemoryPrediction:
    return predict_host_memory(
        shapes,
        **{
            "process_bytes": 300 * MiB,
            "computing_bytes": 70 * MiB,
            "blocks_in_flight": 2,
            "overlap": "eager",
            "pinned": 4 * GiB,
            "idle": 256 * MiB,
            **options,
        },
    )


def test_the_largest_run_of_neighbouring_blocks_is_in_memory() -> None:
    assert forecast().weights == 200 * MiB
    assert forecast(blocks_in_flight=1).weights == 100 * MiB
    assert forecast(blocks_in_flight=3).weights == 280 * MiB
    assert forecast(blocks_in_flight=9).weights == 340 * MiB


def test_states_of_what_is_updated_and_of_what_is_next() -> None:
    assert forecast().states == 2 * (50 + 16) * MiB
    assert forecast(overlap="off").states == 2 * 3 * 16 * MiB


def test_new_weights_wait_for_step_only_with_commit() -> None:
    assert forecast().waiting == 0
    assert forecast(overlap="commit").waiting == 340 * MiB
    assert forecast(overlap="commit", pinned=400 * MiB).waiting == 200 * MiB


@pytest.mark.parametrize("overlap", ["eager", "commit", "off"])
@pytest.mark.parametrize("pinned", [64 * MiB, 512 * MiB, 4 * GiB])
def test_buffers_are_within_what_is_allowed(overlap: str, pinned: int) -> None:
    found = forecast(overlap=overlap, pinned=pinned)
    buffers = found.peak_bytes - found.process - found.computing
    assert buffers <= pinned
    assert (found.beyond > 0) == (buffers == pinned)


def test_narrow_states_are_computed_in_wide_copies() -> None:
    narrow = replace(SHAPES, states_share=1.0, upcast_share=2.0)
    assert forecast(narrow).computing - forecast().computing == 2 * 16 * MiB


def test_it_is_printed_as_a_table() -> None:
    text = str(forecast(pinned=256 * MiB))
    assert "| weights of blocks in flight | 200 MiB |" in text
    assert "| buffers beyond memory.pinned | -" in text


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sum()


@pytest.mark.parametrize("overlap", ["eager", "commit", "off"])
def test_an_engine_predicts_without_moving_anything(disk: Path, overlap: str) -> None:
    model = Chain()
    with streaming(disk, optimizer={"overlap": overlap}) as engine:
        optimizer = engine.attach(model, torch.optim.AdamW(model.parameters()))
        before = engine.metrics()
        found = engine.predict_memory(model, optimizer, torch.ones(4, 64))
        after = engine.metrics()
        for client in ("activations", "optimizer", "parameters"):
            key = f"offload/{client}/read_bytes"
            assert after[key] == before[key]
        # All gradients stay until step(), unless updates use them up as they come.
        assert (found.computing > 6 * 64 * 64 * 4) == (overlap != "eager")
        assert found.weights == 2 * 65 * 64 * 4
        model(torch.ones(4, 64)).backward()
        optimizer.step()
        assert engine.predict_memory(model, optimizer, torch.ones(4, 64)).weights == found.weights


def test_an_optimizer_in_memory_is_counted(disk: Path) -> None:
    model = Chain()
    with streaming(disk, optimizer={"enabled": False}) as engine:
        optimizer = engine.attach(model, torch.optim.AdamW(model.parameters()))
        found = engine.predict_memory(model, optimizer, torch.ones(4, 64))
    assert found.states == 0


def test_it_is_about_streamed_weights(disk: Path) -> None:
    model = Chain()
    with OffloadEngine(settings(disk)) as engine:
        optimizer = engine.attach(model, torch.optim.AdamW(model.parameters()))
        with pytest.raises(ConfigError, match=r"parameters\.enabled"):
            engine.predict_memory(model, optimizer, torch.ones(4, 64))
