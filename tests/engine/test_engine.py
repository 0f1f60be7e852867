"""The engine as its users meet it: what it refuses, what it reports, how it ends."""

import gc
import time
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW

from offload_strategy import ConfigError, OffloadEngine, OffloadError
from tests.conftest import our_threads
from tests.training import (
    assert_same_bits,
    attached,
    gradients,
    in_turn,
    left_bytes,
    same_with_and_without,
    settings,
    weights,
)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))


def train(net, optimizer, count=2):
    loss = torch.zeros(())
    for step in range(count):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = net(torch.randn(4, 8)).pow(2).sum()
        loss.backward()
        optimizer.step()
    return loss.detach()


def trained(engine, count=2):
    """A model that an engine has trained, and its optimizer."""
    net = model()
    optimizer = engine.attach(net, AdamW(net.parameters()))
    train(net, optimizer, count)
    return net, optimizer


def assert_trains_by_itself(net):
    """Fail unless its gradients are those of a copy that no engine knows."""
    twin = model()
    twin.load_state_dict(net.state_dict())
    for each in (net, twin):
        each.zero_grad()
        torch.manual_seed(5)
        each(torch.randn(4, 8)).sum().backward()
    assert_same_bits(gradients(net), gradients(twin))


# ---------------------------------------------------------------------- attaching
@pytest.fixture
def engine(disk):
    with OffloadEngine(settings(disk)) as made:
        yield made


def test_what_cannot_be_attached_is_refused_as_a_whole_and_with_the_reason(disk):
    net, empty = model(), SGD([nn.Parameter(torch.ones(2))], 0.1)
    empty.param_groups[0]["params"].clear()
    with torch.device("meta"):
        unmade = nn.Linear(3, 3)
    refused = [
        ((net, LBFGS(net.parameters())), "needs a closure.*optimizer.enabled to false"),
        ((net, net.parameters()), "expected a torch.optim.Optimizer"),
        ((net, SGD([nn.Parameter(torch.eye(3).to_sparse())], 0.1)), "layout torch.sparse_coo"),
        ((None, empty), "no parameters, so there is nothing to offload"),
        ((nn.ReLU(),), "ReLU has no parameters, so there is nothing to train"),
        ((lambda x: x,), "expected a torch.nn.Module, got function"),
        ((), "pass a model, an optimizer, or both"),
        ((unmade,), "meta device"),
        ((None, SGD(unmade.parameters(), 0.1)), "parameters on the meta device"),
    ]
    with OffloadEngine(settings(disk, optimizer={"enabled": True})) as engine:
        for arguments, reason in refused:
            with pytest.raises(ConfigError, match=reason):
                engine.attach(*arguments)
            assert not net._forward_hooks
        with pytest.raises(ConfigError, match="index must be 0 or more, got -1"):
            engine.microbatch(-1, last=True)
        train(net, engine.attach(net, AdamW(net.parameters())))  # a better one is welcome


def test_what_is_attached_already_is_refused_here_and_by_other_engines(engine, disk):
    net = model()
    plain = AdamW(net.parameters())
    optimizer = engine.attach(net, plain)
    with pytest.raises(ConfigError, match="Sequential is attached already"):
        engine.attach(net)
    for again in (plain, optimizer):
        with pytest.raises(ConfigError, match="this optimizer is attached already"):
            engine.attach(None, again)
    with OffloadEngine(settings(disk)) as other:
        with pytest.raises(ConfigError, match=r"attached already.*close the engine that has it"):
            other.attach(net)
        other.attach(model())
        for parameters in (net.parameters(), [nn.Parameter(torch.ones(1)), net[4].weight]):
            with pytest.raises(ConfigError, match="attached with another optimizer already, by"):
                other.attach(None, SGD(parameters, 0.1))
        fine = other.attach(None, SGD([nn.Parameter(torch.ones(1))], 0.1))
        with pytest.raises(ConfigError, match=r"of shape \(1, 8\).*Attach each parameter to one"):
            fine.add_param_group({"params": [net[4].weight]})
        assert len(fine.param_groups) == 1
    expected = model()
    train(expected, AdamW(expected.parameters()))
    train(net, optimizer)  # the first goes on as if nothing had been
    assert_same_bits(weights(net), weights(expected))


def test_what_was_dropped_leaves_its_address_and_its_parameters_free(engine):
    for _ in range(12):
        net = model()
        for _ in range(2):
            optimizer = engine.attach(net, AdamW(net.parameters()))
            assert len(net._forward_hooks) == 1
            train(net, optimizer)
            # The second of the steps may have to wait for its states until step().
            assert 1 <= engine.metrics()["offload/optimizer/speculated_steps"] <= 2
            optimizer.me = optimizer  # a leftover in a reference cycle
            del optimizer
        del net
        gc.collect()
    assert len(engine._hooks) <= 1


def test_sections_that_are_off_change_nothing(disk):
    off = {"enabled": False}
    with OffloadEngine(settings(disk, activations=off, optimizer=off)) as engine:
        net = model()
        optimizer = AdamW(net.parameters())
        assert engine.attach(net, optimizer) is optimizer
        assert not net._forward_hooks
        with engine.forward():
            train(net, optimizer)
        engine.attach(net, SGD(net.parameters(), 0.1))  # once more, with another optimizer
        assert engine.metrics()["offload/activations/written_bytes"] == 0
    assert OffloadEngine(settings(disk, activations=off, optimizer=off)).attach(net) is None


# ---------------------------------------------------------------------- the end
@pytest.mark.parametrize("way", ["closed twice", "an exception in the block"])
def test_closing_takes_every_hook_off(disk, way):
    engine = OffloadEngine(settings(disk))
    net, optimizer = trained(engine)
    assert not engine.closed
    if way == "closed twice":
        engine.close()
        engine.close()
    else:
        with pytest.raises(ZeroDivisionError), engine:
            raise ZeroDivisionError
    assert engine.closed
    assert our_threads() == set()
    assert not any((net._forward_pre_hooks, net._forward_hooks, net._forward_hooks_always_called))
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    assert_trains_by_itself(net)
    with pytest.raises(OffloadError, match="engine is closed; create a new one"):
        engine.attach(model())
    for use in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    ):
        with pytest.raises(OffloadError, match="closed"):
            use()
    optimizer.zero_grad()
    with engine.forward():  # harmless: the loop around a closed engine still runs
        net(torch.randn(4, 8)).sum().backward()
    engine.microbatch(0, last=True)
    assert engine.metrics()["offload/tier/nvme/used_bytes"] == 0


@pytest.mark.timeout(60)
def test_a_clock_that_a_test_has_replaced_reaches_no_thread(disk, monkeypatch):
    plain, trained = model(), model()
    wanted = train(plain, Adam(plain.parameters()), 4)
    with OffloadEngine(settings(disk)) as engine, monkeypatch.context() as patch:
        for name in ("perf_counter", "monotonic"):
            patch.setattr(time, name, iter(()).__next__)  # as a mock whose values are used up
        loss = train(trained, engine.attach(trained, Adam(trained.parameters())), 4)
        engine.close()
    assert_same_bits({"loss": loss, **weights(trained)}, {"loss": wanted, **weights(plain)})


@pytest.mark.parametrize("kept", ["nothing", "the model", "the optimizer", "the loss"])
def test_a_forgotten_engine_closes_itself(disk, kept):
    def forget():
        engine = OffloadEngine(settings(disk))
        net, optimizer = trained(engine)
        loss = net(torch.randn(4, 8)).sum()
        engine._resources.store.wait_for_writes()
        things = {"the model": net, "the optimizer": optimizer, "the loss": loss}
        return weakref.ref(engine), things.get(kept)

    reference, thing = forget()
    gc.collect()
    assert (reference() is not None) == (kept in ("the model", "the optimizer"))
    if kept == "the model":
        assert_trains_by_itself(thing)  # it still offloads, and what left comes back
    if kept == "the optimizer":
        thing.step()
    if kept == "the loss":
        with pytest.raises(OffloadError, match="closed"):
            thing.backward()
    del thing
    gc.collect()
    assert reference() is None
    assert our_threads() == set()


# ---------------------------------------------------------------------- all of it together
#: The capacity of host memory of configs that are no presets.
BY_HAND = {"on disk": None, "both tiers": "4KiB"}


@pytest.mark.parametrize(
    ("config", "dtype"),
    in_turn([*BY_HAND, "activations", "optimizer", "full"], [torch.float64, torch.float32]),
)
def test_everything_at_once_is_the_same_as_without(disk, config, dtype, monkeypatch):
    """Activations, optimizer, accumulation, clipping, scheduler, evaluation, a checkpoint."""

    def run(engine):
        net = model()
        optimizer = attached(engine, net, AdamW(net.parameters(), 1e-2, fused=True))
        net.to(dtype)  # after it was attached
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)
        history = []
        for step in range(8):
            net.train()
            for index in range(3):
                if engine is not None:
                    engine.microbatch(index, last=index == 2)
                torch.manual_seed(10 * step + index)
                x = torch.randn(4, 8, dtype=dtype)
                with engine.forward() if engine is not None else nullcontext():
                    loss = nn.functional.huber_loss(net(x), x.sum(1, keepdim=True)) / 3
                loss.backward()
                history.append({"loss": loss.detach()})
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            net.eval()
            with torch.no_grad():
                evaluated = net(torch.ones(2, 8, dtype=dtype)).sum()
            history.append({"norm": norm, "evaluated": evaluated})
            if step == 4:
                optimizer.load_state_dict(optimizer.state_dict())
        return [*history, weights(net)]

    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(disk))  # which presets use
    given = settings(disk, BY_HAND[config]) if config in BY_HAND else config
    metrics = same_with_and_without(run, given)
    assert config not in BY_HAND or left_bytes(metrics) > 0
