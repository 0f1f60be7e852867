"""Models that are made while their weights leave, and saved without ever being in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.weights import block_residency as residents
from tests.activations.zoo import batch, build, loss_of
from tests.training import assert_same_bits, settings, weights
from tests.weights.support import away, nearly_all_left, seen_accesses, streaming


@pytest.fixture(autouse=True)
def no_room_for_strays(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tiny models leave as large ones do."""
    monkeypatch.setattr(residents, "_ACCESSED_BYTES", 0)


def made(width: int = 16) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(8, width),
        *(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(4)),
        nn.MultiheadAttention(width, 2).out_proj,
    )


@pytest.mark.parametrize("kind", ["GPT-2", "T5", "ViT", "Mixtral"])
def test_a_model_that_is_built_within_has_the_weights_of_a_plain_build(
    disk: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    accessed = seen_accesses(monkeypatch)
    expected = weights(build(kind))
    with streaming(disk) as engine:
        with engine.building():
            model = build(kind)
        assert nearly_all_left(model)
        engine.attach(model)
        accessed.clear()
        loss_of(model, batch(kind, 0)).backward()
        assert not accessed, "its blocks do not bring them"
    assert_same_bits(weights(model), expected)


def test_a_model_on_the_meta_device_is_filled_module_by_module(disk: Path) -> None:
    expected = weights(made())
    with torch.device("meta"):
        model = made()
    optimizer = torch.optim.AdamW(model.parameters())
    with streaming(disk, optimizer={"overlap": "eager"}) as engine:
        torch.manual_seed(3)
        engine.attach(model, optimizer)
        assert away(model)
        assert not any(parameter.is_meta for parameter in model.parameters())
        torch.manual_seed(3)
        model(torch.randn(2, 8)).sum().backward()
    got = weights(model)
    assert got.keys() == expected.keys()


def test_a_module_that_cannot_fill_itself_is_named(disk: Path) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4096))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Scale())
    with streaming(disk) as engine, pytest.raises(ConfigError, match=r"1 \(Scale\).*building"):
        engine.attach(model)


@pytest.mark.parametrize("doing", ["attach", "load_weights"])
def test_tiers_that_are_too_small_are_refused_before_anything_moves(
    disk: Path, tmp_path: Path, doing: str
) -> None:
    config = settings(disk, parameters={"enabled": True, "min_size": 1})
    config["tiers"][0]["capacity"] = "64KiB"
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    save_file(dict(model.state_dict()), tmp_path / "a.safetensors")
    with OffloadEngine(config) as engine:
        arguments = [tmp_path / "a.safetensors"] if doing == "load_weights" else []
        with pytest.raises(ConfigError, match=rf"{doing}: the weights need 78\.9 KiB.*too little"):
            getattr(engine, doing)(model, *arguments)
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        assert engine._resources.store.live_tickets == 0


@pytest.mark.parametrize(
    ("kind", "shard_bytes"), [("GPT-2", 1), ("Llama", 4096), ("T5", 4096), ("GPT-2", 1 << 30)]
)
def test_saved_weights_load_into_transformers(
    disk: Path, tmp_path: Path, kind: str, shard_bytes: int
) -> None:
    expected = weights(build(kind))
    killed = tmp_path / "saved" / ".model.partial"
    killed.mkdir(parents=True)
    (killed / "half").touch()
    with streaming(disk) as engine:
        model = build(kind)
        engine.attach(model)
        files = engine.save_weights(model, tmp_path / "saved", shard_bytes)
        before = away(model)
    assert before
    model.config.save_pretrained(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved")
    assert_same_bits(weights(loaded), expected)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert not killed.exists()
