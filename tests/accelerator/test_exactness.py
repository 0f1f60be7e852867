"""The same to the last bit on an accelerator, where copies run beside the computation."""

import copy
from contextlib import nullcontext
from itertools import product
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach

from offload_strategy import OffloadEngine
from offload_strategy.io.backends.thread_pool import ThreadPool
from offload_strategy.store import copy_engine
from offload_strategy.torch_support.accelerator import using_stream
from offload_strategy.units import KiB, MiB
from tests.accelerator.support import (
    DEVICE,
    HOSTS,
    STREAMED,
    Transformer,
    delays,
    loss_of,
    make,
    move,
    new_stream,
    sleep,
    stir,
    train,
)
from tests.activations.support import noise
from tests.optimizer.runs import snapshot
from tests.training import (
    assert_same_bits,
    assert_same_history,
    attached,
    backward_history,
    gradients,
    in_turn,
    left_bytes,
    on_disk,
    same_with_and_without,
    settings,
    weights,
)


# ---------------------------------------------------------------------- activations
def passes(engine, wait=True, scope=nullcontext, behind=False, **options):
    """Three steps of gradient descent; with `wait`, backward begins when all is on the disk.

    With `behind`, the host puts, drops and reads tickets long before the device has computed their
    bytes.
    """
    model = make(engine=engine, **options)

    def loss(step):
        dropped = None
        if behind:
            sleep(100_000_000)
            dropped = loss_of(model, step + 50)
            torch.manual_seed(step)
        with scope():
            found = loss_of(model, step)
        del dropped
        stir()
        return found

    def between():
        if engine is not None and wait:
            on_disk(engine)

    return backward_history(model, loss, between=between, after=stir)


SCOPES = {
    "fp32": nullcontext,
    "bf16": lambda: torch.autocast(DEVICE, torch.bfloat16),
    "fp16": lambda: torch.autocast(DEVICE, torch.float16),
}


@pytest.mark.parametrize(("case", "wait"), in_turn(product(HOSTS, SCOPES), [False, True]), ids=str)
def test_gradients_are_the_same(disk, case, wait):
    host, precision = case
    scope = SCOPES[precision]
    assert_same_history(passes(None, scope=scope), passes(None, scope=scope))
    config = settings(disk, host, optimizer={"enabled": False})
    figures = same_with_and_without(lambda engine: passes(engine, wait, scope), config)
    if host is None:
        assert left_bytes(figures) > 1 * MiB
    if host == "1GiB":
        assert figures["offload/activations/written_bytes"] == 0
    torch.accelerator.synchronize()


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        ({}, {"recompute": True}),
        ({"pinned": "64KiB"}, {}),
        ({"pinned": "2MiB"}, {}),
        ({}, {"behind": True, "wait": False}),
        ({}, {"dtype": torch.bfloat16}),
        ({}, {"dtype": torch.float16}),
    ],
    ids=str,
)
def test_gradients_are_the_same_with(disk, memory, options):
    config = settings(disk, optimizer={"enabled": False}, memory=memory)
    same_with_and_without(lambda engine: passes(engine, **options), config)


def test_without_a_thread_to_wait_for_copies_the_caller_waits(disk, monkeypatch):
    tried = []

    class Exhausted(ThreadPool):
        def submit(self, job, died=None):
            tried.append(self)
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copy_engine, "ThreadPool", Exhausted)
    config = settings(disk, optimizer={"enabled": False})
    figures = same_with_and_without(passes, config)
    assert tried
    assert left_bytes(figures) > 1 * MiB


def test_a_device_that_fails_does_not_hold_up_the_writes_that_wait_for_it():
    device, submitted = torch.device(DEVICE, torch.accelerator.device_count() - 1), Event()
    current = []

    class Failed:
        def query(self):
            current.append(torch.accelerator.current_device_index())
            raise RuntimeError("device-side assert triggered")

    engine = copy_engine.CopyEngine(device)
    engine.when_copied(Failed(), [SimpleNamespace(keep_alive=None, submit=submitted.set)])
    assert submitted.wait(60)
    assert current == [device.index]  # events that end on this thread are of this device
    engine.close()


class TwoStreams(nn.Module):
    """Two branches save the same tensor, each on a stream of its own."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.tensor(each)) for each in (1.5, 0.5))
        self.side = new_stream()

    def forward(self, x):
        main = torch.accelerator.current_stream()
        shared = x * 3
        first = (shared * self.one * shared).sum()
        self.side.wait_stream(main)
        with using_stream(self.side):
            second = (shared * self.two * shared).sum()
        shared.record_stream(self.side)
        main.wait_stream(self.side)
        return first, second


@pytest.mark.parametrize("host", [None, "64MiB"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_tensor_may_be_saved_on_two_streams(disk, host, first):
    """Backward of the branch that is added last comes first."""

    def run(engine):
        torch.manual_seed(0)
        model = TwoStreams().to(DEVICE)
        if engine is not None:
            engine.attach(model)
        history = []
        for step in range(2):
            x = noise(64 * KiB, seed=step).to(DEVICE).requires_grad_()
            torch.accelerator.synchronize()
            losses = model(x)
            if engine is not None:
                on_disk(engine)
            stir()
            torch.accelerator.synchronize()
            with delays(step, 0, 3000):
                (losses[first] + losses[1 - first]).backward()
                torch.accelerator.current_stream().wait_stream(model.side)
                torch.accelerator.synchronize()
            history.append({"x": x.grad.cpu(), **{n: g.cpu() for n, g in gradients(model).items()}})
            model.zero_grad()
        return history

    same_with_and_without(run, settings(disk, host, optimizer={"enabled": False}))


class Empties(nn.Module):
    """Empties what it has saved, and fills it again before backward needs it; as Megatron does."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def forward(self, x):
        kept = torch.tanh(x)
        storage = kept.untyped_storage()
        nbytes = storage.nbytes()
        y = kept * self.one
        z = y.sin().sin().sin() * self.two
        storage.resize_(0)

        def refill(_):
            storage.resize_(nbytes)
            torch.empty(0, device=DEVICE).set_(storage, 0, x.shape, x.stride()).copy_(torch.tanh(x))

        y.register_hook(refill)
        return z.sin().sum()


@pytest.mark.parametrize("host", [None, "64MiB"])
def test_a_storage_may_be_emptied_while_its_bytes_leave(disk, host):
    def run(engine):
        model = Empties().to(DEVICE)
        if engine is not None:
            engine.attach(model)

        def loss(step):
            found = model(noise(512 * KiB, seed=step).to(DEVICE))
            stir()
            return found

        return backward_history(model, loss)

    with delays(0, 50, 3000):
        same_with_and_without(run, settings(disk, host, optimizer={"enabled": False}))


# ---------------------------------------------------------------------- optimizer
OPTIMIZERS = {
    "AdamW": lambda p: AdamW(p, 1e-3),
    "AdamW per tensor": lambda p: AdamW(p, 1e-3, foreach=False),
    "AdamW fused": lambda p: AdamW(p, 1e-3, fused=True),
    "AdamW fused amsgrad": lambda p: AdamW(p, 1e-3, fused=True, amsgrad=True),
    "AdamW capturable": lambda p: AdamW(p, 1e-3, capturable=True),
    "AdamW tensor lr": lambda p: AdamW(
        p, torch.tensor(1e-3, device=DEVICE), fused=True, weight_decay=0.1
    ),
    "Adam maximize": lambda p: Adam(p, 1e-3, maximize=True, weight_decay=0.1),
    "SGD momentum": lambda p: SGD(p, 1e-2, momentum=0.9, nesterov=True),
    "SGD momentum fused": lambda p: SGD(p, 1e-2, momentum=0.9, fused=True),
    "SGD": lambda p: SGD(p, 1e-2),
}
fused = OPTIMIZERS["AdamW fused"]


def steps(
    engine, optimizer_of=fused, edit=None, wait=False, scaled=False, micro_batches=1, hints=False
):
    """Seven steps, whose gradients are edited after backward; losses are scaled for half precision.

    What is visible between backward and `step()` is noted in every second step.
    """
    model = make()
    optimizer = attached(engine, model, optimizer_of(model.parameters()))
    scaler = torch.amp.GradScaler(DEVICE, 2.0**14, growth_interval=2, enabled=scaled)
    numbers = []
    for step in range(7):
        optimizer.zero_grad()
        for index in range(micro_batches):
            torch.manual_seed(10 * step + index)
            if engine is not None and hints:
                engine.microbatch(index, last=index == micro_batches - 1)
            with torch.autocast(DEVICE, torch.float16, enabled=scaled):
                loss = loss_of(model, 10 * step + index)
            factor = float("inf") if scaled and step == 3 else 1 / micro_batches
            scaler.scale(loss * factor).backward()
        stir()
        if edit is not None:
            scaler.unscale_(optimizer)
            edit(model, step)
        if step % 2:
            numbers.append({"loss": loss.detach().clone(), **states(model, optimizer)})
        if wait and engine is not None:
            on_disk(engine)
        scaler.step(optimizer)
        scaler.update()
        stir()
        numbers.append(states(model, optimizer) | {"scale": torch.tensor(scaler.get_scale())})
    return numbers


def states(model, optimizer):
    return snapshot(model, optimizer, gradients=False)


def both(disk, overlap="commit", host=None):
    options = {"overlap": overlap, "subgroup_size": 20_000}
    return settings(disk, host, optimizer=options, memory={"pinned": "256MiB"})


def clip(model, norm):
    nn.utils.clip_grad_norm_(model.parameters(), norm)


def scale(model, step, factor):
    for parameter in model.parameters():
        if step % 3 == 1 and parameter.grad is not None:
            parameter.grad.data.mul_(factor)


EDITS = {
    "clipping always": lambda m, step: clip(m, 1e-3),
    "clipping never": lambda m, step: clip(m, 1e9),
    "clipping sometimes": lambda m, step: clip(m, 1e-3 if step == 3 else 1e9),
    "a change that no version counter sees": lambda m, step: scale(m, step, 0.5),
    "a change of all signs": lambda m, step: scale(m, step, -1.0),
}


#: Of `steps`, by what is trained.
LOOPS = {
    **{name: {"optimizer_of": each} for name, each in OPTIMIZERS.items()},
    **{name: {"edit": edit} for name, edit in EDITS.items()},
    **{
        f"{name}, GradScaler, {edit or 'no clipping'}": dict(
            optimizer_of=OPTIMIZERS[name], scaled=True, edit=EDITS.get(edit)
        )
        for name, edit in product(("AdamW", "AdamW fused"), ("", "clipping always"))
    },
    "accumulation": {"micro_batches": 3},
    "accumulation with hints": {"micro_batches": 3, "hints": True},
}


@pytest.mark.parametrize("overlap", ["commit", "off"])
@pytest.mark.parametrize(("loop", "host", "wait"), in_turn(LOOPS, HOSTS, [False, True]))
def test_parameters_and_states_are_the_same(disk, loop, host, wait, overlap):
    """With `wait`, `step()` begins when all is on the disk."""
    config = both(disk, overlap, host)
    figures = same_with_and_without(lambda engine: steps(engine, wait=wait, **LOOPS[loop]), config)
    left = left_bytes(figures, "optimizer")
    assert left + figures.get("offload/tier/host/used_bytes", 0) > 0 or loop == "SGD"


def test_checkpoints_go_both_ways_and_between_devices(disk):
    def begin(engine, saved=None):
        model = make()
        optimizer = attached(engine, model, fused(model.parameters()))
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        return model, optimizer

    whole = begin(None)
    train(*whole, range(6))
    with OffloadEngine(both(disk)) as engine:
        first = begin(None)
        train(*first, range(2))
        second = begin(engine, copy.deepcopy([each.state_dict() for each in first]))
        train(*second, range(2, 4))
        saved = [each.state_dict() for each in second]
        # All of them at once may not fit on the device, so they come on the host.
        for state in saved[1]["state"].values():
            assert state["exp_avg"].device.type == "cpu"
        last = begin(None, saved)
        train(*last, range(4, 6))
    assert_same_bits(states(*last), states(*whole))


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
def test_a_model_may_move_to_the_device_after_it_was_attached(disk, caplog, overlap):
    """With a warning, as tiers and limits are those for the device before."""

    def run(engine):
        torch.manual_seed(0)
        model = Transformer()
        optimizer = attached(engine, model, AdamW(model.parameters(), 1e-3))
        move(model, DEVICE)
        return [*train(model, optimizer, range(3)), states(model, optimizer)]

    same_with_and_without(run, both(disk, overlap))
    assert caplog.text.count("the model has left cpu") == 1


@pytest.mark.parametrize("overlap", ["commit", "off"])
def test_one_optimizer_may_have_parameters_on_two_devices(disk, overlap):
    def run(engine):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16).to(DEVICE)])
        optimizer = attached(engine, None, AdamW(model.parameters(), 1e-2))
        numbers = []
        for step in range(4):
            torch.manual_seed(step)
            optimizer.zero_grad()
            x = model[0](torch.randn(4, 16)).tanh()
            model[1](x.to(DEVICE)).pow(2).sum().backward()
            optimizer.step()
            numbers.append(states(model, optimizer))
        return numbers

    same_with_and_without(run, both(disk, overlap))


class ForeachAddsOne(Optimizer):
    """Its updates tell which kernels it selects: those of a GPU round in different ways."""

    def __init__(self, params):
        super().__init__(params, {"foreach": None, "fused": None})

    def step(self, closure=None):
        for group in self.param_groups:
            params = [each for each in group["params"] if each.grad is not None]
            foreach = group["foreach"]
            if foreach is None:
                _, foreach = _default_to_fused_or_foreach(params, differentiable=False)
            for each in params:
                self.state[each]["momentum"] = torch.zeros_like(each)
                each.data.add_(1 if foreach else 2)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("devices", [(DEVICE, DEVICE), ("cpu", DEVICE)], ids=["one", "two"])
@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
def test_foreach_is_selected_for_a_whole_group_as_without_offload(disk, overlap, devices, streamed):
    def run(engine):
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(16, 16).to(device) for device in devices)
        optimizer = attached(
            engine, model if streamed else None, ForeachAddsOne(model.parameters())
        )
        model[1](model[0](torch.randn(4, 16).to(devices[0])).to(devices[1])).sum().backward()
        optimizer.step()
        if engine is not None:
            engine.close()
        return [weights(model)]

    config = settings(
        disk,
        activations={"enabled": False},
        optimizer={"overlap": overlap},
        parameters=STREAMED if streamed else {"enabled": False},
    )
    same_with_and_without(run, config)
