"""Parameters that several optimizers update, and those of lazy modules, which have no shape yet."""

import logging

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.optimizer.overlap.backward_overlap import BackwardOverlap
from tests.activations.support import noise
from tests.optimizer.runs import EVERY_OVERLAP, snapshot
from tests.training import assert_same_bits, attached, left_bytes, same_with_and_without, settings


def assert_same_with_and_without(script, make, disk, overlap):
    """Fail unless a script notes the same numbers with an engine, which has moved bytes."""

    def run(engine):
        torch.manual_seed(0)
        net = make()
        return script(lambda optimizer: attached(engine, net, optimizer), net)

    figures = same_with_and_without(run, settings(disk, optimizer={"overlap": overlap}))
    for client in ("activations", "optimizer"):
        assert left_bytes(figures, client) > 0


# ---------------------------------------------------------------------- shared parameters
def small_net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 1))


def backward(net, step):
    net(noise(4, 8, seed=step)).pow(2).sum().backward()


def in_turn(attach, net):
    """Two optimizers of all parameters step one after the other, each for its own loss."""
    both = attach(AdamW(net.parameters(), 1e-2)), attach(SGD(net.parameters(), 1e-2, momentum=0.9))
    history = []
    for step, optimizer in enumerate(both * 3):
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()
        history.append(snapshot(net, *both, gradients=False))
    return history


def together(attach, net):
    """Two optimizers with some parameters in common both use the gradients of one backward."""
    one = attach(AdamW(net[:3].parameters(), 1e-2))
    two = attach(Adam(net[2:].parameters(), 1e-2))
    history = []
    for step in range(4):
        net.zero_grad()
        backward(net, step)
        for optimizer in (one, two):
            optimizer.step()
            history.append(snapshot(net, one, two, gradients=False))
    return history


def later(attach, net):
    """Two optimizers share nothing at first; then one gets a group, and a list is edited."""
    one, two = attach(AdamW(net[0].parameters(), 1e-2)), attach(AdamW(net[2].parameters(), 1e-2))
    history = []
    for step in range(6):
        if step == 2:
            two.add_param_group({"params": list(net[0].parameters()), "lr": 1e-3})
        elif step == 4:
            one.param_groups[0]["params"].append(net[3].weight)
            two.param_groups[1]["params"].append(net[3].weight)
        for optimizer in (one, two):
            optimizer.zero_grad()
            backward(net, step)
            optimizer.step()
            two.zero_grad()
            history.append(snapshot(net, gradients=False))
    return history


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
@pytest.mark.parametrize("script", [in_turn, together, later])
def test_optimizers_that_share_parameters_are_identical(script, disk, overlap, caplog):
    if script is later and overlap == "eager":
        pytest.skip("each backward of a shared network updates both optimizers' parameters")
    with caplog.at_level(logging.WARNING):
        assert_same_with_and_without(script, small_net, disk, overlap)
    warned = [r for r in caplog.records if "several optimizers have the same" in r.message]
    assert len(warned) == (overlap != "off")


# ---------------------------------------------------------------------- lazy modules
class Lazy(nn.Module):
    """Lazy layers of several kinds, one that comes late, and one that nobody calls."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.LazyConv1d(6, 3), nn.LazyBatchNorm1d(), nn.GELU(), nn.Flatten(), nn.LazyLinear(16)
        )
        self.late = nn.LazyLinear(16)
        self.never = nn.LazyLinear(3)
        self.out = nn.Linear(16, 1)

    def forward(self, x, late=False):
        x = self.net(x)
        return self.out(x + self.late(x).tanh() if late else x)


def lazy_run(attach, net):
    optimizer = attach(AdamW(net.parameters(), 1e-2))
    history = []
    for step in range(6):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = net(torch.randn(4, 3, 9), late=step > 1).pow(2).sum()
        loss.backward()
        optimizer.step()
        named = [(n, p) for n, p in net.named_parameters() if not n.startswith("never")]
        history.append({n: p.detach().clone() for n, p in named if step > 1 or "late" not in n})
        history[-1]["loss"] = loss.detach().clone()
    history.append({f"{n}.{key}": v for n, p in named for key, v in optimizer.state[p].items()})
    return history


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
@pytest.mark.parametrize("slow", [False, True])
def test_lazy_modules_are_identical(disk, overlap, slow, monkeypatch):
    if slow:  # every update waits for its states until step(), where a late module is noticed
        monkeypatch.setattr(BackwardOverlap, "_advance", lambda self: None)
    assert_same_with_and_without(lazy_run, Lazy, disk, overlap)


@pytest.mark.parametrize("lazy", [True, False])
def test_weights_that_a_first_pass_materializes_stay_in_memory(disk, lazy):
    net = nn.Sequential(nn.LazyLinear(64, bias=False), nn.GELU(), nn.LazyLinear(1))
    if not lazy:
        net(torch.zeros(4, 32))
    with OffloadEngine(settings(disk)) as engine:
        engine.attach(net)
        net(torch.randn(4, 32)).sum().backward()
        saved = engine.metrics()["offload/activations/step_saved_bytes"]
    assert saved == 4 * (4 * 32 + 4 * 64 + 4 * 64)  # of the input, and of GELU what comes and goes


def test_what_lazy_modules_cannot_do_is_refused(disk):
    torch.manual_seed(0)
    with OffloadEngine(settings(disk, parameters={"enabled": True})) as engine:
        net = Lazy()
        with pytest.raises(ConfigError, match=r"Lazy has lazy modules.*Run one forward pass"):
            engine.attach(net, AdamW(net.parameters()))
    with OffloadEngine(settings(disk)) as engine:
        source = nn.Linear(3, 2)
        trained = AdamW(source.parameters())
        source(torch.ones(1, 3)).sum().backward()
        trained.step()
        lazy = nn.LazyLinear(2)
        optimizer = engine.attach(lazy, AdamW(lazy.parameters()))
        with pytest.raises(ConfigError, match="Load the model's weights, or run a forward pass"):
            optimizer.load_state_dict(trained.state_dict())
        lazy.load_state_dict(source.state_dict())
        optimizer.load_state_dict(trained.state_dict())
        for net, each in ((source, trained), (lazy, optimizer)):
            net.zero_grad()
            net(torch.ones(1, 3)).sum().backward()
            each.step()
        assert_same_bits(snapshot(lazy, optimizer), snapshot(source, trained))
