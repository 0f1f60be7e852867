"""What engines open by their config, over several paths, and what leaves where it is left open."""

import json
import sys
from contextlib import closing
from itertools import chain

import pytest
import torch
import yaml
from torch import nn

from offload_strategy import ConfigError, OffloadConfig, OffloadEngine
from offload_strategy.host_memory.memory_limits import PeakMeter
from offload_strategy.io.queues.path_lock import PathLock
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from offload_strategy.store.tiers import HostTier
from offload_strategy.telemetry.recorder import CLIENTS
from offload_strategy.units import MiB
from tests.activations.support import noise
from tests.ends import open_files
from tests.training import assert_same_bits, attached, moved, on_disk, settings, weights


@pytest.fixture
def places(tmp_path):
    made = [tmp_path / "nvme0", tmp_path / "nvme1", tmp_path / "pfs"]
    for place in made:
        place.mkdir()
    return made


def config(*tiers, **sections):
    return {**settings(None, **sections), "tiers": list(tiers)}


def ssd(name, path, **options):
    text = [str(p) for p in path] if isinstance(path, list) else str(path)
    return {"name": name, "kind": "ssd", "path": text, **options}


def train(engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.Linear(256, 8))
    optimizer = attached(engine, model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    found = []
    for step in range(3):
        x = noise(32, 64, seed=step)
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
    for now, then in zip(got, expected, strict=True):
        assert_same_bits(now, then)
    assert written == {str(place) for place in places}
    for tier in tiers:
        assert metrics[f"offload/tier/{tier['name']}/write_GBps"] > 0
        assert metrics[f"offload/tier/{tier['name']}/queued_seconds"] > 0


def test_ssd_tiers_that_follow_each_other_are_one_with_a_queue_for_each_path(places):
    host = {"name": "host", "kind": "dram", "capacity": "1MiB"}
    tiers = host, ssd("nvme0", places[0]), ssd("pfs", places[2])
    with OffloadEngine(config(*tiers, optimizer={"tiers": ["nvme0", "host", "pfs"]})) as engine:
        host, both = engine._resources.clients["activations"]
        first, _, last = engine._resources.clients["optimizer"]
        assert isinstance(host, HostTier)
        assert [*both.queues] == [*first.queues, *last.queues], "whoever uses a path"


def test_a_checksum_without_its_package_says_what_to_install(places, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match=r"checksum: sampled: .*pip install xxhash"):
        OffloadEngine(config(ssd("nvme", places[0]), io={"checksum": "sampled"}))
    with OffloadEngine(config(ssd("nvme", places[0]))):
        assert "pip install xxhash" in caplog.text


def test_an_engine_that_is_refused_for_its_plan_has_nothing_open(places, tmp_path):
    planning = {"plan": str(tmp_path / "missing.json"), "device_memory": "1GiB"}
    sections = {"tiers": [ssd("nvme", places[0])], "planning": planning}
    with pytest.raises(ConfigError, match="cannot be read as a plan") as refused:
        OffloadEngine(sections)
    assert open_files(places[0]) == [], refused


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


# ---------------------------------------------------------------------- what is left open
LIMIT = 512 * MiB
WIDTH, LAYERS = 1024, 8  # 32 MiB of weights, as much of gradients, 64 MiB of states


def network():
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*chain.from_iterable(layers))


def train_network(model, optimizer, batch, steps=2):
    for step in range(steps):
        x = noise(batch, WIDTH, seed=step)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def attached_network(engine):
    model = network()
    return model, engine.attach(model, torch.optim.AdamW(model.parameters()))


def in_use(monkeypatch, mebibytes):
    """Let the process have so much in memory, whatever it really has."""
    for name in ("used_bytes", "peak_bytes"):
        monkeypatch.setattr(PeakMeter, name, lambda _: mebibytes * MiB)


def moves(engine, client):
    on_disk(engine)
    return moved(engine, client) + moved(engine, client, "forwarded") > 0


def sections(disk, **given):
    tiers = [{"name": "nvme", "kind": "ssd", "path": str(disk), "capacity": "1GiB"}]
    return {"tiers": tiers, "memory": LIMIT, **given}


#: What the process has in memory before, in MiB, the batch, and steps: what leaves then.
CASES = {
    "everything stays": (32, 16, 2, set()),
    "activations leave": (232, 4096, 1, {"activations"}),
    "optimizer states leave": (332, 16, 2, {"optimizer"}),
    "weights are streamed": (420, 16, 2, {"optimizer", "parameters"}),
}


def test_an_engine_streams_nothing_for_a_model_that_it_has_refused(disk, monkeypatch):
    in_use(monkeypatch, 420)
    small = [{"name": "nvme", "kind": "ssd", "path": str(disk), "capacity": "4MiB"}]
    with OffloadEngine(sections(disk, tiers=small)) as engine:
        with pytest.raises(ConfigError, match="the weights need"):
            attached_network(engine)
        in_use(monkeypatch, 32)
        other = nn.Linear(8, 8)
        engine.attach(other, torch.optim.AdamW(other.parameters()))
        assert type(other.weight) is nn.Parameter
        assert engine.effective_config().parameters.enabled is False


@pytest.mark.parametrize(("before", "batch", "steps", "leave"), CASES.values(), ids=CASES)
def test_as_much_leaves_as_memory_requires(disk, monkeypatch, before, batch, steps, leave):
    plain, model = network(), network()
    train_network(plain, torch.optim.AdamW(plain.parameters()), batch, steps)
    own = torch.optim.AdamW(model.parameters())
    in_use(monkeypatch, before)
    with OffloadEngine(sections(disk)) as engine:
        optimizer = engine.attach(model, own)
        assert (optimizer is own) == ("optimizer" not in leave)
        train_network(model, optimizer, batch, steps=1)
        assert {client for client in CLIENTS if moves(engine, client)} == leave
        chosen = engine.effective_config()
        assert {client for client in CLIENTS if getattr(chosen, client).enabled} == leave
        assert (chosen.planning.device_memory == LIMIT) == ("activations" in leave)
        assert OffloadConfig(**yaml.safe_load(chosen.to_yaml())) == chosen
    with OffloadEngine(chosen) as engine:  # from the beginning, with what was chosen
        model, optimizer = attached_network(engine)
        train_network(model, optimizer, batch, steps)
        assert {client for client in CLIENTS if moves(engine, client)} == leave
        assert_same_bits(weights(model), weights(plain))


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_that_accumulate_count_as_a_whole(disk, monkeypatch, accumulates):
    in_use(monkeypatch, 376)
    with OffloadEngine(sections(disk)) as engine:
        if accumulates:
            engine.microbatch(0, last=False)
        attached_network(engine)
        assert engine.effective_config().parameters.enabled is accumulates


def test_what_the_config_says_wins(disk, monkeypatch):
    in_use(monkeypatch, 332)
    model = network()
    own = torch.optim.AdamW(model.parameters())
    config = sections(disk, optimizer={"enabled": False}, activations={"min_size": 1})
    with OffloadEngine(config) as engine:
        assert engine.attach(model, own) is own
        train_network(model, own, 64, steps=1)
        assert moves(engine, "activations")
    with OffloadEngine({"mode": "always", **sections(disk)}) as engine:
        assert isinstance(engine.attach(model, own), OffloadedOptimizer)


@pytest.mark.parametrize(
    ("given", "enabled"),
    [
        ({}, ["auto", "auto", "auto"]),
        ({"mode": "always"}, [True, True, False]),
        (
            {"activations": {"min_size": 1}, "optimizer": {"tiers": ["nvme"]}},
            [True, "auto", "auto"],
        ),
        ({"optimizer": {"enabled": "auto", "overlap": "off"}}, ["auto", "auto", "auto"]),
        ({"optimizer": {"overlap": "off"}, "parameters": {"min_size": 1}}, ["auto", True, "auto"]),
    ],
)
def test_sections_with_settings_are_on(disk, given, enabled):
    config = OffloadConfig.load(sections(disk, **given))
    assert [getattr(config, client).enabled for client in CLIENTS] == enabled
    assert config.memory.limit == LIMIT
    assert OffloadConfig(**yaml.safe_load(config.to_yaml())) == config


def test_a_limit_below_what_is_in_use_is_refused_before_a_step(disk, monkeypatch):
    in_use(monkeypatch, 600)
    with OffloadEngine(sections(disk, parameters={"enabled": False})) as engine:
        model, optimizer = attached_network(engine)
        with pytest.raises(ConfigError, match=r"memory\.limit is 512 MiB, and .* MiB are in use"):
            train_network(model, optimizer, 256)
        assert_same_bits(weights(model), weights(network()))


def test_growing_batches_make_activations_leave_in_the_pass_that_needs_it(disk, monkeypatch):
    in_use(monkeypatch, 232)
    with OffloadEngine(sections(disk)) as engine:
        model, optimizer = attached_network(engine)
        train_network(model, optimizer, 64)
        assert not moves(engine, "activations")
        train_network(model, optimizer, 4096, steps=1)
        assert moves(engine, "activations")
