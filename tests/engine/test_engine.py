"""The engine as its users meet it: what it refuses, what it reports, how it ends."""

from __future__ import annotations

import gc
import logging
import math
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW

from offload_strategy import ConfigError, OffloadEngine, OffloadError
from offload_strategy.units import MiB
from tests.conftest import our_threads
from tests.training import assert_same_bits, gradients, settings, weights


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))


def train(engine: OffloadEngine | None, net: nn.Module, optimizer: Any, count: int = 2) -> Any:
    """A few steps; the loss of the last."""
    loss = torch.zeros(())
    for step in range(count):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = net(torch.randn(4, 8)).pow(2).sum()
        loss.backward()
        optimizer.step()
    return loss.detach()


# ---------------------------------------------------------------------- attaching
@pytest.fixture
def engine(disk: Path) -> Any:
    with OffloadEngine(settings(disk)) as made:
        yield made


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "LBFGS": (
        lambda m: LBFGS(m.parameters()),
        "LBFGS cannot be offloaded: it needs a closure.*optimizer.enabled to false",
    ),
    "differentiable": (
        lambda m: Adam(m.parameters(), differentiable=True), "differentiable=True"
    ),
    "no optimizer at all": (lambda m: m.parameters(), "expected a torch.optim.Optimizer"),
    "sparse parameters": (
        lambda m: SGD([nn.Parameter(torch.eye(3).to_sparse())], 0.1), "layout torch.sparse_coo"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_an_optimizer_that_cannot_be_swapped_is_refused_as_a_whole(disk: Path, kind: str) -> None:
    """Where the config asks for it by name."""
    make, message = REFUSED[kind]
    net = model()
    with OffloadEngine(settings(disk, optimizer={"enabled": True})) as engine:
        _refuse(engine, net, make, message)


def _refuse(engine: OffloadEngine, net: nn.Module, make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine.attach(net, make(net))
    assert not net._forward_hooks
    optimizer = engine.attach(net, AdamW(net.parameters()))  # a better one is welcome
    train(engine, net, optimizer)


def test_what_cannot_be_attached_is_refused_with_the_reason(engine: OffloadEngine) -> None:
    emptied = SGD([nn.Parameter(torch.ones(2))], 0.1)
    emptied.param_groups[0]["params"].clear()
    refused: list[tuple[tuple[Any, ...], str]] = [
        ((None, emptied), "no parameters, so there is nothing to offload"),
        ((nn.ReLU(),), "ReLU has no parameters, so there is nothing to train"),
        ((lambda x: x,), "expected a torch.nn.Module, got function"),
        ((), "pass a model, an optimizer, or both"),
    ]
    for arguments, reason in refused:
        with pytest.raises(ConfigError, match=reason):
            engine.attach(*arguments)
    with pytest.raises(ConfigError, match="index must be 0 or more, got -1"):
        engine.microbatch(-1, last=True)


def test_a_model_on_the_meta_device_is_refused(engine: OffloadEngine) -> None:
    with torch.device("meta"):
        net = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match="meta device"):
        engine.attach(net)
    with pytest.raises(ConfigError, match="meta device"):
        engine.attach(net, SGD(net.parameters(), 0.1))
    real = nn.Linear(3, 3)
    engine.attach(real, SGD(real.parameters(), 0.1))


def test_the_same_model_twice_is_refused(engine: OffloadEngine, disk: Path) -> None:
    net = model()
    engine.attach(net)
    with pytest.raises(ConfigError, match="Sequential is attached already"):
        engine.attach(net)
    with OffloadEngine(settings(disk)) as other:
        with pytest.raises(ConfigError, match=r"attached already.*close the engine that has it"):
            other.attach(net)
        other.attach(model())


def test_the_same_twice_and_parameters_of_another_engine_are_refused(
    engine: OffloadEngine, disk: Path
) -> None:
    net: Any = model()
    plain = AdamW(net.parameters())
    optimizer = engine.attach(net, plain)
    for again in (plain, optimizer):
        with pytest.raises(ConfigError, match="this optimizer is attached already"):
            engine.attach(None, again)
    with OffloadEngine(settings(disk)) as other:
        for parameters in (net.parameters(), [nn.Parameter(torch.ones(1)), net[4].weight]):
            with pytest.raises(ConfigError, match="attached with another optimizer already, by"):
                other.attach(None, SGD(parameters, 0.1))
        fine = other.attach(None, SGD([nn.Parameter(torch.ones(1))], 0.1))
        with pytest.raises(ConfigError, match=r"of shape \(1, 8\).*Attach each parameter to one"):
            fine.add_param_group({"params": [net[4].weight]})
        assert len(fine.param_groups) == 1
    expected = model()
    train(None, expected, AdamW(expected.parameters()))
    train(engine, net, optimizer)  # the first goes on as if nothing had been
    assert_same_bits(weights(net), weights(expected))


def test_other_parameters_of_the_same_model_are_fine(engine: OffloadEngine) -> None:
    net: Any = model()
    first = engine.attach(net, AdamW(net[0].parameters()))
    second = engine.attach(net, SGD([*net[2].parameters(), *net[4].parameters()], 0.1))
    plain: Any = model()
    one = AdamW(plain[0].parameters())
    two = SGD([*plain[2].parameters(), *plain[4].parameters()], 0.1)
    for optimizers, network in (((first, second), net), ((one, two), plain)):
        for step in range(3):
            torch.manual_seed(step)
            network.zero_grad()
            network(torch.randn(4, 8)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert_same_bits(weights(net), weights(plain))


def test_two_engines_may_have_different_models(disk: Path) -> None:
    expected = model()
    train(None, expected, AdamW(expected.parameters()))
    with OffloadEngine(settings(disk)) as one, OffloadEngine(settings(disk)) as other:
        for engine in (one, other, other):  # the last one outlives the first
            net = model()
            train(engine, net, engine.attach(net, AdamW(net.parameters())))
            assert_same_bits(weights(net), weights(expected))
            one.close()


def test_after_closing_the_same_may_be_attached_to_another_engine(disk: Path) -> None:
    net = model()
    plain = model()
    expected = AdamW(plain.parameters())
    train(None, plain, expected, 2)
    train(None, plain, expected, 2)
    states = None
    for _ in range(2):
        with OffloadEngine(settings(disk)) as engine:
            optimizer = engine.attach(net, AdamW(net.parameters()))
            if states is not None:
                optimizer.load_state_dict(states)
            train(engine, net, optimizer, 2)
            states = optimizer.state_dict()
    assert_same_bits(weights(net), weights(plain))


def test_what_was_dropped_leaves_its_address_and_its_parameters_free(
    engine: OffloadEngine,
) -> None:
    """`id()` of a model that died is given to another."""
    for _ in range(12):
        net = model()
        for _ in range(2):
            optimizer = engine.attach(net, AdamW(net.parameters()))
            assert len(net._forward_hooks) == 1
            train(engine, net, optimizer, 1)
            del optimizer
            gc.collect()
        del net
        gc.collect()
    assert len(engine._hooks) <= 1


def test_sections_that_are_off_change_nothing(disk: Path) -> None:
    off = {"enabled": False}
    with OffloadEngine(settings(disk, activations=off, optimizer=off)) as engine:
        net = model()
        optimizer = AdamW(net.parameters())
        assert engine.attach(net, optimizer) is optimizer
        assert not net._forward_hooks
        with engine.forward():
            train(engine, net, optimizer)
        assert engine.attach(model()) is None
        assert engine.metrics()["offload/activations/written_bytes"] == 0


# ---------------------------------------------------------------------- metrics
def contract_keys(tiers: list[str]) -> set[str]:
    """The keys that scripts outside of the project rely on."""
    keys = {
        f"offload/{client}/{figure}"
        for client in ("activations", "optimizer", "parameters")
        for figure in ("written_bytes", "read_bytes", "forwarded_bytes", "stall_seconds")
    }
    keys |= {
        f"offload/tier/{name}/{figure}"
        for name in tiers
        for figure in ("used_bytes", "read_GBps", "write_GBps")
    }
    keys |= {
        f"offload/memory/{figure}"
        for figure in ("pinned_bytes", "pinned_peak_bytes", "fragmentation")
    }
    return keys | {
        "offload/host/rss_bytes",
        "offload/device/peak_bytes",
        "offload/endurance/written_bytes",
        "offload/endurance/projected_years",
    }


@pytest.mark.parametrize("tiers", [["nvme"], ["host"], ["host", "nvme"]], ids=str)
def test_every_metric_of_the_contract_is_there(disk: Path, tiers: list[str]) -> None:
    config = settings(disk if "nvme" in tiers else None, "1MiB" if "host" in tiers else None)
    with OffloadEngine(config) as engine:
        net = model()
        optimizer = engine.attach(net, AdamW(net.parameters()))
        found = [engine.metrics()]
        train(engine, net, optimizer)
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
    if "host" in tiers:  # host memory does not wear out, and has room for all of it
        assert found[1]["offload/endurance/written_bytes"] == 0
        assert found[1]["offload/tier/host/used_bytes"] > 0


def test_metrics_say_what_was_moved(disk: Path) -> None:
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


def test_without_a_rating_the_projected_life_is_not_a_number(engine: OffloadEngine) -> None:
    net = model()
    train(engine, net, engine.attach(net, AdamW(net.parameters())))
    engine._resources.store.wait_for_writes()
    assert engine.metrics()["offload/endurance/written_bytes"] > 0
    assert math.isnan(engine.metrics()["offload/endurance/projected_years"])


def test_a_run_that_wears_its_drives_is_told_once(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(disk)
    config["tiers"][0] |= {"endurance_tbw": 1e-6, "endurance_share": 0.5}  # a megabyte
    with OffloadEngine(config) as engine, caplog.at_level("WARNING", logger="offload_strategy"):
        for nbytes in (400_000, 600_000, 1_000_000):
            net = nn.Linear(1, nbytes // 8, bias=False)
            optimizer = engine.attach(net, AdamW(net.parameters()))  # two states of 4 bytes
            net(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            engine._resources.store.wait_for_writes()
            engine._metrics.warn_about_endurance()
            assert ("rated for" in caplog.text) == (nbytes > 400_000)
        metrics = engine.metrics()
    assert metrics["offload/endurance/written_bytes"] >= 2_000_000
    per_day = metrics["offload/endurance/written_bytes_per_day"]
    assert per_day > metrics["offload/endurance/written_bytes"]
    told = [record.message for record in caplog.records if "rated for" in record.message]
    assert len(told) == 1
    assert told[0].startswith("tier nvme: this run has written")


# ---------------------------------------------------------------------- advice
def test_that_offload_is_not_needed_is_said_once(
    engine: OffloadEngine, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    with caplog.at_level(logging.INFO, "offload_strategy"):
        train(engine, net, engine.attach(net, AdamW(net.parameters())), 5)
    said = [text for text in caplog.messages if "not needed" in text]
    assert len(said) == 1
    assert re.search(r"offload is not needed here: the .*iB that it moves would fit", said[0])


def test_nothing_is_said_where_memory_is_short(
    engine: OffloadEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    class Short:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Short)
    net = model()
    with caplog.at_level(logging.INFO, "offload_strategy"):
        train(engine, net, engine.attach(net, AdamW(net.parameters())), 3)
    assert not [text for text in caplog.messages if "not needed" in text]


# ---------------------------------------------------------------------- the end
def test_closing_takes_every_hook_off_and_may_be_done_twice(disk: Path) -> None:
    engine = OffloadEngine(settings(disk))
    net = model()
    optimizer = engine.attach(net, AdamW(net.parameters()))
    train(engine, net, optimizer)
    assert not engine.closed
    engine.close()
    engine.close()
    assert engine.closed
    assert our_threads() == set()
    assert not net._forward_pre_hooks
    assert not net._forward_hooks
    assert not net._forward_hooks_always_called
    assert all(not p._post_accumulate_grad_hooks for p in net.parameters())
    # The model trains on by itself, as if there had never been an engine.
    twin = model()
    twin.load_state_dict(net.state_dict())
    for each in (net, twin):
        each.zero_grad()
        torch.manual_seed(5)
        each(torch.randn(4, 8)).sum().backward()
    assert_same_bits(gradients(net), gradients(twin))


def test_a_closed_engine_says_so(disk: Path) -> None:
    engine = OffloadEngine(settings(disk))
    net = model()
    optimizer = engine.attach(net, AdamW(net.parameters()))
    engine.close()
    with pytest.raises(OffloadError, match="engine is closed; create a new one"):
        engine.attach(model())
    with pytest.raises(OffloadError, match="closed"):
        optimizer.step()
    with engine.forward():  # harmless: the loop around a closed engine still runs
        net(torch.randn(4, 8)).sum().backward()
    engine.microbatch(0, last=True)
    assert contract_keys(["nvme"]) <= engine.metrics().keys()


def test_an_exception_in_the_block_closes_the_engine(disk: Path) -> None:
    net = model()
    engine = OffloadEngine(settings(disk))

    def fail() -> None:
        with engine:
            engine.attach(net)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert engine.closed
    assert not net._forward_hooks


@pytest.mark.parametrize("kept", ["nothing", "the model", "the optimizer", "the loss"])
def test_a_forgotten_engine_closes_itself(disk: Path, kept: str) -> None:
    def forget() -> Any:
        engine = OffloadEngine(settings(disk))
        net = model()
        optimizer = engine.attach(net, AdamW(net.parameters()))
        train(engine, net, optimizer)
        loss = net(torch.randn(4, 8)).sum()
        engine._resources.store.wait_for_writes()
        things = {"the model": net, "the optimizer": optimizer, "the loss": loss}
        return weakref.ref(engine), things.get(kept)

    reference, thing = forget()
    gc.collect()
    assert (reference() is not None) == (kept in ("the model", "the optimizer"))
    if kept == "the model":
        # It still offloads, and what left comes back.
        twin = model()
        twin.load_state_dict(thing.state_dict())
        for each in (thing, twin):
            each.zero_grad()
            torch.manual_seed(5)
            each(torch.randn(4, 8)).sum().backward()
        assert_same_bits(gradients(thing), gradients(twin))
    if kept == "the optimizer":
        thing.step()
    if kept == "the loss":
        with pytest.raises(OffloadError, match="closed"):
            thing.backward()
    del thing
    gc.collect()
    assert reference() is None
    assert our_threads() == set()


@pytest.mark.parametrize("preset", ["activations", "optimizer", "full"])
def test_presets_train(preset: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(disk))
    expected = model()
    train(None, expected, AdamW(expected.parameters()))
    with OffloadEngine(preset) as engine:
        net = model()
        train(engine, net, engine.attach(net, AdamW(net.parameters())))
        assert_same_bits(weights(net), weights(expected))


def test_the_environment_variable_is_the_default_config(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(disk))
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", '{"activations": {"min_size": 123}}')
    with OffloadEngine() as engine:
        assert engine.config.activations.min_size == 123
        assert [tier.path for tier in engine.config.tiers] == [disk]


# ---------------------------------------------------------------------- all of it together
@pytest.mark.parametrize("host", [None, "4KiB"])
def test_everything_at_once_is_the_same_as_without(disk: Path, host: str | None) -> None:
    """Activations, optimizer, accumulation, clipping, scheduler, evaluation, a checkpoint."""

    def run(engine: OffloadEngine | None) -> list[Any]:
        net = model()
        optimizer: Any = AdamW(net.parameters(), 1e-2, fused=True)
        if engine is not None:
            optimizer = engine.attach(net, optimizer)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)
        history: list[Any] = []
        for step in range(8):
            net.train()
            for index in range(3):
                if engine is not None:
                    engine.microbatch(index, last=index == 2)
                torch.manual_seed(10 * step + index)
                x = torch.randn(4, 8)
                with engine.forward() if engine is not None else nullcontext():
                    loss = nn.functional.huber_loss(net(x), x.sum(1, keepdim=True)) / 3
                loss.backward()
                history.append(loss.item())
            history.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            net.eval()
            with torch.no_grad():
                history.append(net(torch.ones(2, 8)).sum().item())
            if step == 4:
                optimizer.load_state_dict(optimizer.state_dict())
        history.append({name: value.tolist() for name, value in weights(net).items()})
        return history

    expected = run(None)
    with OffloadEngine(settings(disk, host)) as engine:
        assert run(engine) == expected
        assert engine.metrics()["offload/activations/written_bytes"] > 0


def test_a_model_may_change_its_dtype_after_it_was_attached(engine: OffloadEngine) -> None:
    plain, net = model(), model()
    expected: Any = AdamW(plain.parameters())
    optimizer = engine.attach(net, AdamW(net.parameters()))
    for each, steps in ((plain, expected), (net, optimizer)):
        each.to(torch.float64)
        for step in range(3):
            torch.manual_seed(step)
            steps.zero_grad()
            each(torch.randn(4, 8, dtype=torch.float64)).pow(2).sum().backward()
            steps.step()
    assert_same_bits(weights(net), weights(plain))
