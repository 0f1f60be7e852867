"""What the engine reports: its metrics, the wear of drives, and whether offload is needed."""

import logging
import math
import re
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from offload_strategy.units import MiB
from tests.engine.test_engine import engine, model, train
from tests.training import settings

__all__ = ["engine"]


def contract_keys(tiers: list[str]) -> set[str]:
    """The keys that scripts outside of the project rely on."""
    moved = ("written_bytes", "read_bytes", "forwarded_bytes", "stall_seconds")
    figures = {
        "activations": moved,
        "optimizer": moved,
        "parameters": moved,
        **{f"tier/{name}": ("used_bytes", "read_GBps", "write_GBps") for name in tiers},
        "memory": ("pinned_bytes", "pinned_peak_bytes", "fragmentation"),
        "host": ("rss_bytes",),
        "device": ("peak_bytes",),
        "endurance": ("written_bytes", "projected_years"),
    }
    return {f"offload/{of}/{figure}" for of, names in figures.items() for figure in names}


@pytest.mark.parametrize("tiers", [["nvme"], ["host"], ["host", "nvme"]], ids=str)
def test_every_metric_of_the_contract_is_there(disk, tiers):
    config = settings(disk if "nvme" in tiers else None, "1MiB" if "host" in tiers else None)
    with OffloadEngine(config) as engine:
        net = model()
        optimizer = engine.attach(net, AdamW(net.parameters()))
        found = [engine.metrics()]
        train(net, optimizer)
        found.append(engine.metrics())
        engine.close()
        found.append(engine.metrics())
    for metrics in found:
        assert contract_keys(tiers) <= metrics.keys()
        assert all(type(value) is float for value in metrics.values())
        assert all(key.startswith("offload/") for key in metrics)
        for key, value in metrics.items():
            if not key.endswith("projected_years"):
                assert math.isfinite(value), key
                assert value >= 0, key
        assert math.isnan(metrics["offload/endurance/projected_years"]), "no drive has a rating"
    if "host" in tiers:  # host memory does not wear out, and has room for all of it
        assert found[1]["offload/endurance/written_bytes"] == 0
        assert found[1]["offload/tier/host/used_bytes"] > 0


def test_metrics_say_what_was_moved(disk):
    whole = {"overlap": "off", "subgroup_size": "auto"}
    config = settings(disk, activations={"min_size": "4KiB"}, optimizer=whole)
    config["tiers"][0]["endurance_tbw"] = 100
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    with OffloadEngine(config) as engine:
        store = engine._resources.store
        optimizer = engine.attach(net, AdamW(net.parameters()))
        x = torch.randn(32, 64)  # 8 KiB
        loss = net(x).pow(2).sum()
        store.wait_for_writes()
        metrics = engine.metrics()
        # The input and what tanh saved; the square's input is outside of the model.
        activations = 2 * 32 * 64 * 4
        assert metrics["offload/activations/written_bytes"] == activations
        assert metrics["offload/tier/nvme/used_bytes"] == activations
        assert metrics["offload/activations/read_bytes"] == 0
        assert metrics["offload/memory/pinned_bytes"] == 0
        loss.backward()
        del loss
        metrics = engine.metrics()
        assert metrics["offload/activations/read_bytes"] == activations
        assert metrics["offload/activations/forwarded_bytes"] == 0
        assert metrics["offload/activations/stall_seconds"] > 0
        assert metrics["offload/tier/nvme/used_bytes"] == 0
        optimizer.step()
        store.wait_for_writes()
        states = 2 * 2 * 64 * 64 * 4  # two moments of two layers
        metrics = engine.metrics()
        assert metrics["offload/optimizer/written_bytes"] == states
        assert metrics["offload/tier/nvme/used_bytes"] == states
        assert metrics["offload/endurance/written_bytes"] == activations + states
        assert metrics["offload/endurance/projected_years"] > 0
        assert metrics["offload/tier/nvme/write_GBps"] > 0
        assert metrics["offload/tier/nvme/read_GBps"] > 0
        assert metrics["offload/memory/pinned_peak_bytes"] >= 2 * 64 * 64 * 4
        assert 0 <= metrics["offload/memory/fragmentation"] < 1
        assert metrics["offload/host/rss_bytes"] > 50 * MiB
        for client in ("written", "read", "forwarded"):
            assert metrics[f"offload/parameters/{client}_bytes"] == 0
        moves = list(engine._recorder.moves)
        assert sum(m.nbytes for m in moves if m.direction == "write") == activations + states


def test_a_run_that_wears_its_drives_is_told_once(disk, caplog):
    config = settings(disk)
    config["tiers"][0] |= {"endurance_tbw": 1e-6, "endurance_share": 0.5}  # a megabyte
    with OffloadEngine(config) as engine, caplog.at_level("WARNING", logger="offload_strategy"):
        for nbytes in (400_000, 600_000, 1_000_000):
            net = nn.Linear(1, nbytes // 8, bias=False)
            optimizer = engine.attach(net, AdamW(net.parameters()))  # two states of 4 bytes
            net(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            engine._resources.store.wait_for_writes()
            engine._metrics.warn_about_wear()
            assert ("rated for" in caplog.text) == (nbytes > 400_000)
        metrics = engine.metrics()
    assert metrics["offload/endurance/written_bytes"] >= 2_000_000
    per_day = metrics["offload/endurance/written_bytes_per_day"]
    assert per_day > metrics["offload/endurance/written_bytes"]
    told = [record.message for record in caplog.records if "rated for" in record.message]
    assert len(told) == 1
    assert told[0].startswith("tier nvme: this run has written")


# ---------------------------------------------------------------------- advice
@pytest.mark.parametrize("is_short", [False, True])
def test_that_offload_is_not_needed_is_said_once_unless_memory_is_short(
    engine, caplog, monkeypatch, is_short
):
    if is_short:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    net = model()
    with caplog.at_level(logging.INFO, "offload_strategy"):
        train(net, engine.attach(net, AdamW(net.parameters())), 5)
    said = [text for text in caplog.messages if "not needed" in text]
    assert len(said) == (not is_short)
    for text in said:
        assert re.search(r"offload is not needed here: the .*iB that it moves would fit", text)
