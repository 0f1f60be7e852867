"""Engines over several paths: what is opened, what is refused, and the same bits."""

import json
import sys
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy import OffloadEngine
from offload_strategy.errors import ConfigError
from offload_strategy.io.queues.path_lock import PathLock
from offload_strategy.store.tiers import HostTier
from tests.ends import open_files
from tests.training import Numbers, assert_same_history, attached, on_disk, settings, weights


@pytest.fixture
def places(tmp_path):
    made = [tmp_path / "nvme0", tmp_path / "nvme1", tmp_path / "pfs"]
    for place in made:
        place.mkdir()
    return made


def config(*tiers: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    return {**settings(None, **sections), "tiers": list(tiers)}


def ssd(name: str, path: Any, **options: Any) -> dict[str, Any]:
    text = [str(p) for p in path] if isinstance(path, list) else str(path)
    return {"name": name, "kind": "ssd", "path": text, **options}


def train(engine: OffloadEngine | None) -> list[Numbers]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.Linear(256, 8))
    optimizer = attached(engine, model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    found: list[Numbers] = []
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": loss.detach()})
    return [*found, weights(model)]


@pytest.mark.parametrize(("layout", "checksum"), [("one tier", "full"), ("several tiers", "auto")])
def test_training_over_several_paths_changes_no_bit(places, layout, checksum, monkeypatch):
    # Tickets of this model are small; stripe them all the same.
    monkeypatch.setattr("offload_strategy.store.tiers.STRIPE_BYTES", 1)
    monkeypatch.setattr("offload_strategy.store.tiers.STRIPE_UNIT", 4096)
    if layout == "one tier":
        tiers = [ssd("nvme", places, capacity="64MiB")]
    else:
        tiers = [ssd(place.name, place, capacity="64MiB") for place in places]
    expected = train(None)
    with OffloadEngine(config(*tiers, io={"checksum": checksum})) as engine:
        got = train(engine)
        on_disk(engine)
        written = {move.path for move in engine._recorder.moves if move.direction == "write"}
        metrics = engine.metrics()
    assert_same_history(got, expected)
    assert written == {str(place) for place in places}
    for tier in tiers:
        assert metrics[f"offload/tier/{tier['name']}/write_GBps"] > 0
        assert metrics[f"offload/tier/{tier['name']}/queued_seconds"] > 0


def test_ssd_tiers_that_follow_each_other_are_one_with_a_queue_for_each_path(places):
    made = config(
        {"name": "host", "kind": "dram", "capacity": "1MiB"},
        ssd("nvme0", places[0]),
        ssd("pfs", places[2]),
        optimizer={"tiers": ["nvme0", "host", "pfs"]},
    )
    with OffloadEngine(made) as engine:
        host, both = engine._resources.clients["activations"]
        first, _, last = engine._resources.clients["optimizer"]
        assert isinstance(host, HostTier)
        assert [*both.queues] == [*first.queues, *last.queues], "whoever uses a path"


def test_paths_are_measured_only_where_work_is_dealt(places):
    for count, measured in ((1, False), (2, True)):
        with OffloadEngine(config(ssd("nvme", places[:count]))) as engine:
            for queue in engine._resources.queues["nvme"]:
                assert ((queue.bandwidth.round_trip() or 0) > 1e6) == measured
            assert engine.metrics()["offload/tier/nvme/used_bytes"] == 0


def test_one_capacity_for_all_paths_of_a_tier(places):
    with OffloadEngine(config(ssd("nvme", places, capacity="10MiB"))) as engine:
        (tier,) = engine._resources.clients["optimizer"]
        assert tier.capacity == 10 << 20
    with pytest.raises(ConfigError, match="'nvme': capacity is"):
        OffloadEngine(config(ssd("nvme", places, capacity="1000000GiB")))


def test_a_checksum_without_its_package_says_what_to_install(places, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match=r"checksum: sampled: .*pip install xxhash"):
        OffloadEngine(config(ssd("nvme", places[0]), io={"checksum": "sampled"}))
    with OffloadEngine(config(ssd("nvme", places[0]))):
        assert "pip install xxhash" in caplog.text


def test_a_trace_is_of_the_run_and_path_locks_end_with_the_engine(places, tmp_path):
    with OffloadEngine(config(ssd("nvme", places[0]))) as engine:
        train(engine)
        assert open_files(places[0]), "the file, and the directory that is locked"
        engine.export_trace(tmp_path / "trace.json")
    assert open_files(places[0]) == []
    with closing(PathLock(places[0])) as late:
        late.acquire()
        late.release()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "optimizer" in {event["args"].get("client") for event in events if event["ph"] == "X"}
