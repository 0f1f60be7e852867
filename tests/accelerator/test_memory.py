"""Memory of the device and pinned memory: limits hold, and what left or failed is freed."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from offload_strategy import OffloadEngine
from offload_strategy.activations import budgets
from offload_strategy.activations.budgets import AutomaticBudget
from offload_strategy.activations.planned_budget import MemoryLimit
from offload_strategy.host_memory import buffers
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.optimizer.overlap.overlap_modes import RetainedGradients
from offload_strategy.torch_support.accelerator import available_bytes as available_bytes_of
from offload_strategy.units import PAGE_BYTES, MiB
from tests.accelerator.support import (
    BATCH,
    DEVICE,
    SIZE,
    config_of,
    device_module,
    five_steps,
    idle_memory,
    loss_of,
    make,
    memory_beyond,
    peaks,
    sleep,
    stir,
    train,
)
from tests.activations.support import noise
from tests.training import (
    assert_same_history,
    attached,
    same_with_and_without,
    settings,
    weights,
)

# ---------------------------------------------------------------------- limits
#: How much of what plain training takes is allowed, a tier of host memory, and whether it is a
#: limit of plans, or of all memory in use, under which ``mode: auto`` chooses what leaves.
LIMITS = [
    (0.4, None, True),
    (0.7, "1GiB", True),
    (0.4, "16MiB", True),
    (2.0, None, True),
    *product((0.3, 0.7, 2.0), [None], [False]),
]


def training(engine, steps):
    model = make(*SIZE)
    optimizer = attached(engine, model, AdamW(model.parameters()))
    found = []
    highest = peaks(
        lambda step: found.extend(train(model, optimizer, range(step, step + 1), **BATCH)), steps
    )
    return [{n: v.cpu() for n, v in each.items()} for each in (*found, weights(model))], highest


def test_without_a_limit_there_is_room_for_what_the_allocator_of_a_device_does_not_use():
    parameter = torch.zeros(8, device=DEVICE)
    limit = MemoryLimit(None, profile_passes=0)
    limit.measure(parameter)
    assert limit.limit_bytes() < 0.9 * available_bytes_of(parameter.device)


@pytest.mark.parametrize(("share", "host", "planned"), LIMITS)
def test_a_limit_holds_and_what_fits_stays(disk, share, host, planned):
    steps = 12 if planned else 8
    idle_memory()
    expected, plain = training(None, steps)
    before = idle_memory()
    limit = int(before + share * (max(plain) - before))
    activations = {"enabled": True if planned else "auto", "min_size": "16KiB"}
    config = config_of(disk, activations=activations, memory={"pinned": "256MiB"})
    if planned:
        config |= {"optimizer": {"enabled": False}, "planning": {"device_memory": limit}}
    else:
        config["memory"]["limit"] = limit
    if host is not None:
        config["tiers"].insert(0, {"name": "host", "kind": "dram", "capacity": host})
    with OffloadEngine(config) as engine:
        got, highest = training(engine, steps)
        figures, chosen = engine.metrics(), engine.effective_config()
    assert_same_history(got, expected)
    told = f"{[peak // MiB for peak in highest]} of {limit // MiB} MiB, plain {max(plain) // MiB}"
    # A plan is of what earlier steps did; `memory.limit` holds from the first step on.
    assert max(highest[-4:] if planned else highest) <= limit, told
    if planned:
        assert figures["offload/activations/plan_limit_bytes"] == limit
        assert (figures["offload/activations/step_left_bytes"] == 0) is (share > 1)
    else:
        assert not chosen.optimizer.enabled, told
        assert chosen.activations.enabled is (share < 1), told


def large():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(2048, 2048, device=DEVICE) for _ in range(16)))


def losses_of(model, optimizer):
    inputs, found = torch.ones(8, 2048, device=DEVICE), []
    for _ in range(3):
        loss = (model(inputs) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        del loss
    return found


def test_weights_larger_than_the_memory_allowed_are_trained(disk):
    model = large()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    expected = losses_of(model, AdamW(model.parameters(), lr=1e-3))
    del model
    used = idle_memory()
    sections = {"parameters": {"enabled": True}, "optimizer": {"overlap": "eager"}}
    config = config_of(disk, **sections, memory={"pinned": "256MiB"})
    # The weights do not fit: `close` brings them back when the limit is gone.
    with OffloadEngine(config) as engine, memory_beyond(int(0.75 * nbytes)):
        with pytest.raises(torch.OutOfMemoryError):
            large()
        idle_memory()
        device_module.reset_peak_memory_stats()
        with engine.building():
            model = large()
        optimizer = engine.attach(model, AdamW(model.parameters(), lr=1e-3))
        assert losses_of(model, optimizer) == expected
        assert device_module.max_memory_allocated() - used < 0.75 * nbytes


def test_what_the_link_cannot_hide_leaves_if_the_device_is_short_of_memory(disk, monkeypatch):
    """The default budget keeps it otherwise; plain training is out of memory."""
    monkeypatch.setattr(budgets, "_UNMEASURED_BYTES", 0)
    activations = {"enabled": True, "min_size": "16KiB"}
    config = config_of(disk, activations=activations, optimizer={"enabled": False})
    config["tiers"].insert(0, {"name": "host", "kind": "dram", "capacity": "1GiB"})
    monkeypatch.setattr(AutomaticBudget, "_admits_on_device", lambda *_: False)
    idle_memory()
    expected, plain = training(None, 4)
    with OffloadEngine(config) as engine:
        assert_same_history(training(engine, 4)[0], expected)
        assert engine.metrics()["offload/activations/step_left_bytes"] == 0
    before = idle_memory()
    with memory_beyond(int(0.6 * (max(plain) - before))):
        with pytest.raises(torch.OutOfMemoryError):
            training(None, 4)
        idle_memory()
        with OffloadEngine(config) as engine:
            got, highest = training(engine, 4)
            figures = engine.metrics()
    assert_same_history(got, expected)
    saved, left = (figures[f"offload/activations/step_{kind}_bytes"] for kind in ("saved", "left"))
    assert 0 < left < saved, f"{[peak // MiB for peak in highest]} MiB"


# ---------------------------------------------------------------------- what is given back
def test_pinned_memory_is_given_back(disk):
    with OffloadEngine(settings(disk, optimizer={"enabled": False})) as engine:
        model = make(engine=engine)
        for step in range(3):
            loss_of(model, step).backward()
        assert engine.metrics()["offload/memory/pinned_peak_bytes"] > 0
        pending = loss_of(model, 9)
    # Closed with copies and writes under way, and a graph that still refers to them.
    del pending
    torch.accelerator.synchronize()
    assert engine.metrics()["offload/memory/pinned_bytes"] == 0


@pytest.mark.parametrize("overlap", ["eager", "off"])
def test_new_states_take_the_pinned_memory_of_the_old_ones(disk, overlap):
    """Although the host has launched all updates before the device has read the first states."""
    sections = {"activations": {"enabled": False}, "memory": {"pinned": "16MiB"}}
    sections["optimizer"] = {"overlap": overlap, "subgroup_size": 1 << 20}
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16))).to(DEVICE)
    with OffloadEngine(settings(disk, "1GiB", **sections)) as engine:
        optimizer = engine.attach(model, AdamW(model.parameters(), 1e-3))
        for _ in range(3):
            sleep(600_000_000)
            model(torch.ones(1, 1024, device=DEVICE)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.accelerator.synchronize()
        pinned = engine.metrics()["offload/memory/pinned_peak_bytes"]
    states = 2 * sum(each.nbytes for each in model.parameters())
    assert pinned <= 1.5 * states


class Wide(nn.Module):
    """A layer that takes 32 times as much memory for a while as it returns."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x)
        return y.expand(32, *y.shape).sin().mean(0)


@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_and_new_weights_stay_where_that_does_not_raise_the_peak(
    disk, recomputes, monkeypatch
):
    """The room is that of saved tensors, which backward frees; regions computed again have none.

    What such a region takes for a while is above what is in use at updates, time and again.
    """
    sections = {"activations": {"enabled": False}, "optimizer": {"subgroup_size": 1 << 18}}
    found = {}

    def run(engine):
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(16))
        model = nn.Sequential(*layers).to(DEVICE)
        optimizer = attached(engine, model, AdamW(model.parameters(), 1e-3))
        for _ in range(3):
            device_module.reset_peak_memory_stats()
            x = torch.ones(256 if recomputes else 2048, 512, device=DEVICE, requires_grad=True)
            for layer in model:
                x = checkpoint(Wide(layer), x, use_reentrant=False) if recomputes else layer(x)
            x.pow(2).mean().backward()
            del x
            optimizer.step()
            optimizer.zero_grad()
        found["peak"] = device_module.max_memory_allocated() - idle_memory()
        return [weights(model)]

    def trained(memory_on_device):
        stays = []

        def noted(*args):
            memory = memory_on_device(*args)
            stays.append(memory is not None)
            return memory

        monkeypatch.setattr(RetainedGradients, "memory_on_device", noted)
        same_with_and_without(run, settings(disk, "1GiB", **sections))
        return found["peak"], sum(stays) / len(stays)

    peak, share = trained(RetainedGradients.memory_on_device)
    lower_peak, none = trained(lambda *_: None)
    assert peak <= lower_peak + 8 * MiB  # of updates that run
    assert none == 0
    assert share < 0.5 if recomputes else share > 0.5


def test_pinned_memory_is_exactly_as_asked():
    """Torch's own allocator of pinned memory would round every size up to a power of two."""
    pool = BufferPool(16 * MiB)
    nbytes = 4 * MiB + PAGE_BYTES
    buffer = pool.acquire(nbytes, pinned=True)
    assert buffer.is_pinned()
    assert pool.usage().held_bytes == nbytes
    del buffer
    pool.close()


def test_memory_that_cannot_be_pinned_is_used_all_the_same(disk, monkeypatch, caplog):
    monkeypatch.setattr(buffers, "register_host_memory", lambda *_: False)
    buffers._warn_of_pageable_memory.cache_clear()
    figures = same_with_and_without(five_steps, settings(disk, "16KiB"))
    assert figures["offload/optimizer/written_bytes"] > 0
    assert "could not be pinned" in caplog.text


def test_a_model_is_on_a_device_that_is_not_the_current_one(disk):
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    assert torch.accelerator.current_device_index() == 0
    device = f"{DEVICE}:1"

    def run(engine):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Tanh()).to(device)
        optimizer = attached(engine, model, AdamW(model.parameters(), 1e-2))
        found = []
        for step in range(4):
            loss = model(noise(64, 64, seed=step).to(device)).pow(2).mean()
            stir()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append({"loss": loss.detach()})
        return [*found, weights(model)]

    for host in (None, "16KiB"):
        figures = same_with_and_without(run, settings(disk, host))
        assert figures["offload/activations/written_bytes"] > 0


# ---------------------------------------------------------------------- errors
def fail_in(hook, error, model):
    def fail(*_):
        raise error

    handle = getattr(model.blocks[1], f"register_{hook}_hook")(fail)
    with pytest.raises(error):
        loss_of(model, 99).backward()
    handle.remove()


def run_out_of_memory(model):
    allowed = 1 << (30 if DEVICE == "cuda" else 26)
    with memory_beyond(allowed), pytest.raises(torch.OutOfMemoryError):
        loss_of(model, 99, rows=256, length=4096).backward()


TROUBLES = {
    "out of memory": run_out_of_memory,
    "Ctrl-C in forward": partial(fail_in, "forward", KeyboardInterrupt),
    "an error in backward": partial(fail_in, "full_backward", ZeroDivisionError),
}


@pytest.mark.parametrize("overlap", ["commit", "off"])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_training_goes_on_after(disk, trouble, overlap):
    """Three steps, one with trouble where there is an engine, which is left out, and three more."""

    def run(engine):
        model = make()
        optimizer = attached(engine, model, AdamW(model.parameters(), 1e-3))
        found = train(model, optimizer, range(3))
        if engine is not None:
            TROUBLES[trouble](model)
            model.zero_grad()
            idle_memory()
        return [*found, *train(model, optimizer, range(3, 6)), weights(model)]

    config = settings(disk, optimizer={"overlap": overlap})
    # What the batch that is too large saves until then has room in the tier.
    config["tiers"][0]["capacity"] = "4GiB"
    with OffloadEngine(config) as engine:
        assert_same_history(run(engine), run(None))
        idle_memory()
    assert engine.metrics()["offload/memory/pinned_bytes"] == 0


# ---------------------------------------------------------------------- the report
@pytest.mark.parametrize("steps", [3, 9])  # the device times the first eight passes
def test_saved_tensors_are_in_memory_from_their_save_to_their_use_in_a_report(steps, disk):
    config = settings(disk)
    config["tiers"][0]["capacity"] = "1GiB"
    with OffloadEngine(config) as engine:
        net = make(64, 4)
        optimizer = engine.attach(net, AdamW(net.parameters()))
        train(net, optimizer, range(steps), **BATCH)
        torch.accelerator.synchronize()
        report, profile = engine.report(), engine.profile()
    saved = [span for span in report.timeline if span.lane == "forward"]
    used = [span for span in report.timeline if span.lane == "backward"]
    assert len(saved) == len(used) == len(profile.tensors)
    assert saved[0].nbytes >= profile.tensors[0].nbytes
    assert 0 <= saved[0].begin <= used[-1].begin
    saveable = sum(tensor.nbytes for tensor in profile.tensors)
    assert 0 < max(span.nbytes for span in saved) < saveable, "some had left"
    assert used[-1].nbytes < max(span.nbytes for span in saved)
    assert report.comparison is not None
