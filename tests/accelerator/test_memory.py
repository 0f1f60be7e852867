"""Memory of the device and pinned memory: limits hold, and what left or failed is freed."""

import ctypes
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.backends import kvikio, posix  # noqa: F401 - before posix is replaced
from offload_strategy.store.copy_engine import CopyEngine
from offload_strategy.torch_support.accelerator import using_stream
from offload_strategy.units import PAGE_BYTES, KiB, MiB
from tests.accelerator.support import (
    BATCH,
    DEVICE,
    SIZE,
    Deep,
    delays,
    device_module,
    idle_memory,
    loss_of,
    make,
    memory_beyond,
    peaks,
    sleep,
    train,
)
from tests.activations.support import noise
from tests.paced import PacedBackend
from tests.training import assert_same_history, attached, same_with_and_without, settings, weights


def config_of(disk, **sections):
    """With the defaults of what is not given, and all the space that the disk has."""
    return {"tiers": [{"name": "nvme", "kind": "ssd", "path": str(disk)}], **sections}


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


def test_pinned_memory_is_exactly_as_asked():
    """Torch's own allocator of pinned memory would round every size up to a power of two."""
    pool = BufferPool(16 * MiB)
    nbytes = 4 * MiB + PAGE_BYTES
    buffer = pool.acquire(nbytes, pinned=True)
    assert buffer.is_pinned()
    assert pool.usage().held_bytes == nbytes
    del buffer
    pool.close()


def six_steps(engine):
    model = make(32, 2)
    optimizer = attached(engine, model, AdamW(model.parameters(), 1e-3))
    found = train(model, optimizer, range(6), rows=2, length=16)
    states = optimizer.state_dict()["state"]
    found.append({f"{i} {k}": v for i, each in states.items() for k, v in each.items()})
    return [*found, weights(model)]


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
@pytest.mark.parametrize("capacity", ["64KiB", "16MiB"], ids=["some", "all"])
def test_what_fits_in_a_tier_of_the_device_does_not_move_and_is_freed_at_the_end(
    disk, overlap, capacity
):
    config = settings(disk, activations={"enabled": False}, optimizer={"overlap": overlap})
    config["tiers"].insert(0, {"name": "device", "kind": "device", "capacity": capacity})
    six_steps(None)  # cuBLAS keeps the workspace of the first product
    before = idle_memory()
    figures = same_with_and_without(six_steps, config)
    moved = figures["offload/optimizer/written_bytes"] + figures["offload/optimizer/read_bytes"]
    assert (moved == 0) is (capacity == "16MiB")
    assert figures["offload/tier/device/used_bytes"] > 0
    assert idle_memory() <= before + 4096


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


# ---------------------------------------------------------------------- pace
LAYERS = 40
SAVED = LAYERS * 4 * MiB
STEPS = 4
#: As many may be needed beside other work, until the device hides in one what it could hide alone.
MOST_STEPS = 24
#: Keeps the device about 300 ms behind the host.
BEHIND = 600_000_000


@pytest.fixture
def paced_disk(monkeypatch):
    """A gigabyte in a second, and in memory where that is a directory: no disk is slower."""
    monkeypatch.setattr(posix, "PosixBackend", partial(PacedBackend, read=1e9, write=1e9))
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


def waiting_calls():
    """Of a simulated device: what waited for it and what pinned memory since the last call."""
    counts = device_module.counts(reset=True) if DEVICE == "sim" else {}
    return {name: n for name, n in counts.items() if name.startswith(("sync:", "pinned:"))}


def behind(engine, cycles=0, limit=None):
    """The gradient; the bytes at the begin of each step and on top; what the last one waits for.

    The device is far behind the host in each step. With a limit, more steps follow until one of
    them, but for the first, takes no more bytes.
    """
    model = Deep(LAYERS, cycles).to(DEVICE)
    if engine is not None:
        engine.attach(model)
    x = noise(1 << 20).to(DEVICE).requires_grad_()
    begins, beyond, waits = [], [], {}

    def step(_):
        nonlocal waits
        begins.append(device_module.memory_allocated())
        waiting_calls()
        sleep(BEHIND)
        x.grad = None
        model(x).sum().backward()
        waits = waiting_calls()

    def is_done():
        within = limit is None or min(beyond[1:], default=limit + 1) <= limit
        return len(beyond) >= (STEPS if within else MOST_STEPS)

    while not is_done():
        beyond.extend(peak - begins[-1] for peak in peaks(step, 1))
    return x.grad.cpu(), begins, beyond, waits


@pytest.mark.parametrize(
    ("host", "defaults"),
    [*product([None, "1MiB", "1GiB"], [False]), *product([None, "48MiB", "1GiB"], [True])],
)
def test_memory_is_freed_although_the_device_is_behind(paced_disk, host, defaults):
    """All leaves; or, with `budget: auto`, what can be hidden, as each layer computes for 20 ms."""
    config = settings(paced_disk, host)
    config |= {"mode": "always", "optimizer": {"enabled": False}, "memory": {"pinned": "1GiB"}}
    config["activations"] = {} if defaults else {"budget": "100%"}
    config["tiers"][-1]["capacity"] = "4GiB"
    expected, plain_begins, plain_peaks, _ = behind(None)
    limit = int(0.35 * SAVED)
    automatic = {"cycles": 40_000_000, "limit": limit} if defaults else {}
    late_us = 2500 if defaults else 0
    with delays(1, late_us, late_us), OffloadEngine(config) as engine:
        got, begins, taken, waits = behind(engine, **automatic)
        assert engine.metrics()["offload/device/peak_bytes"] > 0
    assert torch.equal(got, expected)
    assert min(plain_peaks) >= SAVED
    assert len({*begins[1:], *plain_begins[1:]}) == 1, "nothing is kept from one step to the next"
    # Not the largest with the defaults: beside other work, a step keeps what it could not write.
    told = f"peaks of {[peak // MiB for peak in taken]} of {SAVED // MiB} MiB"
    assert (min if defaults else max)(taken[1:]) <= limit, told
    if host == "1GiB" and not defaults:
        assert waits == {}, "a steady step neither waits for the device nor pins memory"


class BeginsOnTheHost(Deep):
    """Its first saved tensor is not on the device."""

    def forward(self, x):
        return super().forward((x * torch.ones((), requires_grad=True)).to(DEVICE))


def test_memory_is_freed_although_a_pass_begins_on_the_host(disk):
    model, x = BeginsOnTheHost(24).to(DEVICE), noise(1 * MiB)
    before = idle_memory()
    [plain] = peaks(lambda _: model(x).sum().backward(), 1)
    with OffloadEngine(config_of(disk, activations={"budget": "100%"})) as engine:
        engine.attach(model)
        highest = peaks(lambda _: model(x).sum().backward(), 2)
    assert max(highest) - before < (plain - before) // 2


@pytest.mark.skipif(DEVICE != "sim", reason="needs the simulated accelerator")
def test_memory_that_a_path_fills_is_not_used_by_copies():
    engine = CopyEngine(torch.device(DEVICE, 0))
    hosts = list(torch.full((8 * 64 * KiB,), 7, dtype=torch.uint8).split(64 * KiB))
    _, incoming = engine._copying(torch.accelerator.current_stream())
    with using_stream(incoming):
        sleep(400_000_000)
    copies = engine.load(hosts, [None] * 8)
    filled = engine.incoming(8 * 64 * KiB)
    ctypes.memset(filled.data_ptr(), 1, filled.nbytes)  # as a path does it: on no stream
    torch.accelerator.synchronize()
    assert filled.cpu().unique().tolist() == [1]
    assert torch.cat([engine.adopt(copy) for copy in copies]).cpu().unique().tolist() == [7]
    engine.close()


@pytest.mark.skipif(DEVICE != "sim", reason="needs the simulated accelerator")
def test_small_tensors_cross_the_link_together(disk):
    """A pass saves 1,000 tensors of 16 KiB, in four batches."""

    def run(engine):
        model = Deep(500).to(DEVICE)
        if engine is not None:
            engine.attach(model)
        x = torch.linspace(-1, 1, 4096, device=DEVICE).requires_grad_()
        for _ in range(4):
            torch.accelerator.synchronize()
            device_module.counts(reset=True)
            x.grad = None
            model(x).sum().backward()
        counts = device_module.counts()
        return x.grad.cpu(), counts

    config = settings(disk, "1GiB", optimizer={"enabled": False}, memory={"pinned": "1GiB"})
    with OffloadEngine(config) as engine:
        got, counts = run(engine)
        moved = engine.metrics()["offload/activations/step_left_bytes"]
    assert torch.equal(got, run(None)[0])
    assert moved > 7 * MiB
    assert counts["async:copy DtoH"] <= 8, counts
    assert counts["async:copy HtoD"] <= 16, counts


def counted(engine, scaled):
    """Synchronising calls and registrations of host memory in the last step, by any thread."""
    model = make(32, 2)
    optimizer = attached(engine, model, AdamW(model.parameters(), 1e-3, foreach=True))
    scaler = torch.amp.GradScaler(DEVICE, enabled=scaled)
    for step in range(8):
        waiting_calls()
        loss = loss_of(model, step, rows=2, length=16)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found = waiting_calls()
        torch.accelerator.synchronize()
    return found


@pytest.mark.skipif(DEVICE != "sim", reason="needs the simulated accelerator")
@pytest.mark.parametrize(
    ("overlap", "scaled"),
    # An update during backward cannot be scaled after it.
    [*product([None, "off", "commit"], [False, True]), ("eager", False)],
)
def test_a_steady_step_does_not_wait(paced_disk, overlap, scaled):
    expected = counted(None, scaled)
    section = {"enabled": False} if overlap is None else {"overlap": overlap}
    config = settings(paced_disk, "1GiB", optimizer=section, memory={"pinned": "1GiB"})
    with OffloadEngine(config) as engine:
        got = counted(engine, scaled)
    ours = Counter(got) - Counter(expected)
    # `commit` reads what its comparisons found, and the factor by which gradients were scaled.
    assert ours.total() <= (1 + scaled if overlap == "commit" else 0), ours


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
