"""Tiers of optimizer states where an accelerator trains: what stays, what moves, what is freed."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from offload_strategy.host_memory.memory_limits import PeakMeter, available_bytes
from offload_strategy.units import MiB
from tests.accelerator.support import DEVICE, five_steps, idle_memory
from tests.training import (
    assert_same_bits,
    attached,
    moved,
    on_disk,
    same_with_and_without,
    settings,
    weights,
)


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
@pytest.mark.parametrize("capacity", ["64KiB", "16MiB"], ids=["some", "all"])
def test_what_fits_in_a_tier_of_the_device_does_not_move_and_is_freed_at_the_end(
    disk, overlap, capacity
):
    config = settings(disk, activations={"enabled": False}, optimizer={"overlap": overlap})
    config["tiers"].insert(0, {"name": "device", "kind": "device", "capacity": capacity})
    five_steps(None)  # cuBLAS keeps the workspace of the first product
    before = idle_memory()
    figures = same_with_and_without(five_steps, config)
    moved = figures["offload/optimizer/written_bytes"] + figures["offload/optimizer/read_bytes"]
    assert (moved == 0) is (capacity == "16MiB")
    assert figures["offload/tier/device/used_bytes"] > 0
    assert idle_memory() <= before + 4096


@pytest.mark.parametrize(("overlap", "stays"), [("commit", 46 * 2 / 3), ("eager", 46), ("off", 22)])
def test_as_many_optimizer_states_stay_as_the_device_has_room_for(
    disk, monkeypatch, overlap, stays
):
    def network():
        torch.manual_seed(0)  # 32 MiB of weights, as much of gradients, 64 MiB of states
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).to(DEVICE)

    def trained(engine):
        model = network()
        optimizer = attached(engine, model, AdamW(model.parameters(), 1e-3))
        for _ in range(3):
            model(torch.ones(4, 1024, device=DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if engine is not None:
                on_disk(engine)  # the next step would cancel what is not
        return weights(model)

    plain = trained(None)
    # Three quarters of the limit are 384 MiB: 46 MiB are left beside the gradients of two updates,
    # or 22 MiB beside all gradients. With `commit`, those of states that stay do so, too.
    for name in ("used_bytes", "peak_bytes"):
        monkeypatch.setattr(PeakMeter, name, lambda _: 330 * MiB)
    tiers = [{"name": "nvme", "kind": "ssd", "path": str(disk), "capacity": "1GiB"}]
    section = {"enabled": "auto", "overlap": overlap}
    config, written = {"tiers": tiers, "memory": 512 * MiB, "optimizer": section}, []
    for _ in range(2):
        with OffloadEngine(config) as engine:
            assert_same_bits(trained(engine), plain)
            written.append(moved(engine, "optimizer"))
            config = engine.effective_config()
        tier = config.tiers[0]
        assert (tier.name, tier.kind) == ("device", "device")
        assert tier.capacity == pytest.approx(stays * MiB, abs=MiB / 2)
    # States of 8 MiB each: whole subgroups stay. New weights may have to wait on the disk.
    states = 64 * MiB - tier.capacity + 8 * MiB
    assert written[0] <= 3 * states * (1.5 if overlap == "commit" else 1)
    assert abs(written[0] - written[1]) <= 3 * 4 * MiB, "the config chooses the same"


@pytest.mark.parametrize("kind", [DEVICE, "cpu"])
def test_by_default_half_of_the_host_memory_comes_before_the_disk(disk, kind, monkeypatch):
    """Unless the CPU trains, which has all else in host memory."""
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(disk))
    with OffloadEngine({"mode": "always", "activations": {"min_size": 1}}) as engine:
        tier = engine.config.tiers[0]
        assert [each.name for each in engine.config.tiers] == ["host", "ssd"]
        assert 0.4 < tier.capacity / available_bytes() < 0.6
        model = nn.Linear(64, 64, device=kind)
        optimizer = engine.attach(model, AdamW(model.parameters(), 1e-3))
        for _ in range(2):
            model(torch.ones(4, 64, device=kind)).pow(2).sum().backward()
            optimizer.step()
        on_disk(engine)
        figures = engine.metrics()
    written = figures["offload/optimizer/written_bytes"]
    in_host = figures["offload/tier/host/used_bytes"]
    assert (written > 0, in_host > 0) == ((kind == "cpu"), (kind != "cpu"))
