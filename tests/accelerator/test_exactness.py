"""The same to the last bit on CUDA, where copies run beside the computation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from offload_strategy import OffloadEngine
from offload_strategy.torch_support.accelerator import using_stream
from offload_strategy.units import MiB
from tests.accelerator.support import (
    BATCH,
    DEVICE,
    SIZE,
    TIERS,
    Transformer,
    batch,
    device_module,
    loss_of,
    make,
    needs_accelerator,
    new_stream,
    sleep,
    stir,
)
from tests.training import (
    Numbers,
    activations_only,
    assert_same_bits,
    assert_same_history,
    gradients,
    moved,
    on_disk,
    settings,
)

pytestmark = needs_accelerator


# ---------------------------------------------------------------------- activations
def history(
    model: nn.Module, between: Callable[[], None] = lambda: None, scope: Any = nullcontext
) -> list[Numbers]:
    """Three steps of gradient descent."""
    numbers = []
    for step in range(3):
        torch.manual_seed(step)
        with scope():
            loss = loss_of(model, step)
        stir()
        between()
        loss.backward()
        stir()
        numbers.append({"loss": loss.detach(), **gradients(model)})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
                parameter.grad = None
    return numbers


SCOPES: dict[str, Any] = {
    "fp32": nullcontext,
    "bf16": lambda: torch.autocast(DEVICE, torch.bfloat16),
    "fp16": lambda: torch.autocast(DEVICE, torch.float16),
}


@pytest.mark.parametrize("precision", SCOPES)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("wait", [False, True], ids=["at once", "when it is on the disk"])
def test_gradients_are_the_same(disk: Path, tiers: str, precision: str, wait: bool) -> None:
    scope = SCOPES[precision]
    expected = history(make(), scope=scope)
    assert_same_history(history(make(), scope=scope), expected)
    with activations_only(disk, **TIERS[tiers]) as engine:
        model = make()
        engine.attach(model)
        between = (lambda: on_disk(engine)) if wait else (lambda: None)
        assert_same_history(history(model, between, scope), expected)
        if tiers == "disk":
            assert moved(engine) + moved(engine, verb="forwarded") > 1 * MiB
        if tiers == "host memory":
            assert moved(engine) == 0
    torch.accelerator.synchronize()


def test_gradients_are_the_same_with_checkpoints(disk: Path) -> None:
    expected = history(make(recompute=True))
    with activations_only(disk) as engine:
        model = make(recompute=True)
        engine.attach(model)
        assert_same_history(history(model, lambda: on_disk(engine)), expected)


@pytest.mark.parametrize("pinned", ["64KiB", "2MiB"])
def test_gradients_are_the_same_with_little_pinned_memory(disk: Path, pinned: str) -> None:
    expected = history(make())
    config = settings(disk, optimizer={"enabled": False}, memory={"pinned": pinned})
    with OffloadEngine(config) as engine:
        model = make()
        engine.attach(model)
        assert_same_history(history(model, lambda: on_disk(engine)), expected)


def test_gradients_are_the_same_on_a_stream_of_the_users(disk: Path) -> None:
    expected = history(make())
    with activations_only(disk) as engine:
        model = make()
        engine.attach(model)
        stream = new_stream()
        stream.wait_stream(torch.accelerator.current_stream())
        with using_stream(stream):
            got = history(model)
        stream.synchronize()
        assert_same_history(got, expected)


def test_gradients_are_the_same_while_the_device_lags_behind(disk: Path) -> None:
    """The host puts, drops and reads tickets long before the device has computed their bytes."""

    def run(model: nn.Module) -> list[Numbers]:
        numbers = []
        for step in range(4):
            torch.manual_seed(step)
            sleep(100_000_000)
            dropped = loss_of(model, step + 50)
            torch.manual_seed(step)
            loss = loss_of(model, step)
            del dropped
            stir()
            loss.backward()
            numbers.append({"loss": loss.detach(), **gradients(model)})
            model.zero_grad()
        return numbers

    expected = run(make())
    with activations_only(disk) as engine:
        model = make()
        engine.attach(model)
        assert_same_history(run(model), expected)


def test_graphs_may_be_kept_gone_through_twice_and_differentiated_twice(disk: Path) -> None:
    def run(model: nn.Module) -> Numbers:
        torch.manual_seed(0)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        first, second = loss_of(model, 1), loss_of(model, 2)
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        numbers = gradients(model)
        model.zero_grad()
        x = batch(3).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        return numbers | {f"second {name}": grad for name, grad in gradients(model).items()}

    expected = run(make())
    with activations_only(disk) as engine:
        model = make()
        engine.attach(model)
        assert_same_bits(run(model), expected)


def test_device_memory_is_really_freed(disk: Path) -> None:
    def peak(engine: OffloadEngine | None) -> int:
        model = make(*SIZE)
        if engine is not None:
            engine.attach(model)
        for number in range(2):
            torch.accelerator.synchronize()
            device_module.reset_peak_memory_stats()
            before = device_module.memory_allocated()
            loss_of(model, number, **BATCH).backward()
            if engine is not None:
                on_disk(engine)
            model.zero_grad()
        torch.accelerator.synchronize()
        return device_module.max_memory_allocated() - before

    plain = peak(None)
    config = settings(disk, activations={"min_size": "64KiB"}, optimizer={"enabled": False})
    config["activations"]["prefetch"] = "16MiB"
    config["memory"]["pinned"] = "256MiB"
    config["tiers"][0]["capacity"] = "8GiB"
    with OffloadEngine(config) as engine:
        offloaded = peak(engine)
        assert engine.metrics()["offload/device/peak_bytes"] > 0
    assert offloaded < 0.6 * plain, f"{offloaded / MiB:.0f} of {plain / MiB:.0f} MiB"


# ---------------------------------------------------------------------- optimizer
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
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


def states(model: nn.Module, optimizer: Optimizer) -> Numbers:
    numbers: Numbers = {}
    for name, parameter in model.named_parameters():
        numbers[name] = parameter.detach().clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                numbers[f"{name}.{key}"] = value.clone()
    return numbers


def train(
    optimizer_of: Callable[[Any], Optimizer],
    engine: OffloadEngine | None,
    edit: Callable[[nn.Module, int], None] = lambda model, step: None,
    steps: int = 5,
    wait: bool = False,
) -> list[Numbers]:
    model = make()
    optimizer: Any = optimizer_of(model.parameters())
    if engine is not None:
        optimizer = engine.attach(model, optimizer)
    numbers = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        stir()
        edit(model, step)
        numbers.append({"loss": loss.detach().clone(), **states(model, optimizer)})
        if wait and engine is not None:
            on_disk(engine)
        optimizer.step()
        stir()
        numbers.append(states(model, optimizer))
    return numbers


def both(disk: Path, overlap: str, **options: Any) -> dict[str, Any]:
    return settings(
        disk,
        options.get("host"),
        optimizer={"overlap": overlap, "subgroup_size": 20_000},
        memory={"pinned": "256MiB"},
    )


@pytest.mark.parametrize("overlap", ["commit", "off"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_states_are_the_same(disk: Path, name: str, overlap: str) -> None:
    expected = train(OPTIMIZERS[name], None)
    with OffloadEngine(both(disk, overlap)) as engine:
        assert_same_history(train(OPTIMIZERS[name], engine), expected)
        assert moved(engine, "optimizer") > 0 or name == "SGD"


@pytest.mark.parametrize("overlap", ["commit", "off"])
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("wait", [False, True], ids=["at once", "when it is on the disk"])
def test_parameters_and_states_are_the_same_on_every_tier(
    disk: Path, tiers: str, overlap: str, wait: bool
) -> None:
    expected = train(OPTIMIZERS["AdamW fused"], None)
    with OffloadEngine(both(disk, overlap, **TIERS[tiers])) as engine:
        got = train(OPTIMIZERS["AdamW fused"], engine, wait=wait)
        assert_same_history(got, expected)


def clip(model: nn.Module, norm: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), norm)


def scale_data(model: nn.Module, step: int, factor: float) -> None:
    for parameter in model.parameters():
        if step % 3 == 1 and parameter.grad is not None:
            parameter.grad.data.mul_(factor)


EDITS: dict[str, Callable[[nn.Module, int], None]] = {
    "clipping always": lambda m, step: clip(m, 1e-3),
    "clipping never": lambda m, step: clip(m, 1e9),
    "clipping sometimes": lambda m, step: clip(m, 1e-3 if step == 3 else 1e9),
    "a change that no version counter sees": lambda m, step: scale_data(m, step, 0.5),
    "a change of all signs": lambda m, step: scale_data(m, step, -1.0),
}


@pytest.mark.parametrize("overlap", ["commit", "off"])
@pytest.mark.parametrize("name", EDITS)
def test_changes_of_gradients_are_honoured(disk: Path, name: str, overlap: str) -> None:
    expected = train(OPTIMIZERS["AdamW fused"], None, EDITS[name])
    with OffloadEngine(both(disk, overlap)) as engine:
        assert_same_history(train(OPTIMIZERS["AdamW fused"], engine, EDITS[name]), expected)


@pytest.mark.parametrize("overlap", ["commit", "off"])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
def test_mixed_precision_with_a_gradient_scaler_is_the_same(
    disk: Path, name: str, clip: bool, overlap: str
) -> None:
    def run(engine: OffloadEngine | None) -> list[Numbers]:
        model = make()
        optimizer: Any = OPTIMIZERS[name](model.parameters())
        if engine is not None:
            optimizer = engine.attach(model, optimizer)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**14, growth_interval=2)
        numbers = []
        for step in range(7):
            torch.manual_seed(step)
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.float16):
                loss = loss_of(model, step) * (float("inf") if step == 3 else 1)
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
            numbers.append(states(model, optimizer) | {"scale": torch.tensor(scaler.get_scale())})
        return numbers

    expected = run(None)
    with OffloadEngine(both(disk, overlap)) as engine:
        assert_same_history(run(engine), expected)


@pytest.mark.parametrize("hints", [False, True])
def test_accumulation_is_the_same(disk: Path, hints: bool) -> None:
    def run(engine: OffloadEngine | None) -> list[Numbers]:
        model = make()
        optimizer: Any = OPTIMIZERS["AdamW fused"](model.parameters())
        if engine is not None:
            optimizer = engine.attach(model, optimizer)
        numbers = []
        for step in range(4):
            optimizer.zero_grad()
            for index in range(3):
                torch.manual_seed(10 * step + index)
                if engine is not None and hints:
                    engine.microbatch(index, last=index == 2)
                (loss_of(model, 10 * step + index) / 3).backward()
            optimizer.step()
            numbers.append(states(model, optimizer))
        return numbers

    expected = run(None)
    with OffloadEngine(both(disk, "commit")) as engine:
        assert_same_history(run(engine), expected)


def test_checkpoints_go_both_ways_and_between_devices(disk: Path) -> None:
    def steps(model: nn.Module, optimizer: Any, begin: int, end: int) -> None:
        for step in range(begin, end):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    plain = make()
    whole = OPTIMIZERS["AdamW fused"](plain.parameters())
    steps(plain, whole, 0, 6)
    with OffloadEngine(both(disk, "commit")) as engine:
        model = make()
        optimizer: Any = OPTIMIZERS["AdamW fused"](model.parameters())
        steps(model, optimizer, 0, 2)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model = make()
        optimizer = engine.attach(model, OPTIMIZERS["AdamW fused"](model.parameters()))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        steps(model, optimizer, 2, 4)
        optimizer_state = optimizer.state_dict()
        # All of them at once may not fit on the device, so they come on the host.
        for state in optimizer_state["state"].values():
            assert state["exp_avg"].device.type == "cpu"
        last = make()
        last.load_state_dict(model.state_dict())
        final: Any = OPTIMIZERS["AdamW fused"](last.parameters())
        final.load_state_dict(optimizer_state)
        steps(last, final, 4, 6)
    assert_same_bits(states(last, final), states(plain, whole))


def test_a_model_may_move_to_the_device_after_it_was_attached(disk: Path) -> None:
    def run(engine: OffloadEngine | None) -> Numbers:
        torch.manual_seed(0)
        model = Transformer()
        optimizer: Any = AdamW(model.parameters(), 1e-3)
        if engine is not None:
            optimizer = engine.attach(model, optimizer)
        model.to(DEVICE)
        for step in range(3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        return states(model, optimizer)

    expected = run(None)
    with OffloadEngine(both(disk, "commit")) as engine:
        assert_same_bits(run(engine), expected)


@pytest.mark.parametrize("overlap", ["commit", "off"])
def test_one_optimizer_may_have_parameters_on_two_devices(disk: Path, overlap: str) -> None:
    def run(engine: OffloadEngine | None) -> list[Numbers]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16).to(DEVICE)])
        optimizer: Any = AdamW(model.parameters(), 1e-2)
        if engine is not None:
            optimizer = engine.attach(None, optimizer)
        numbers = []
        for step in range(4):
            torch.manual_seed(step)
            optimizer.zero_grad()
            x = model[0](torch.randn(4, 16)).tanh()
            model[1](x.to(DEVICE)).pow(2).sum().backward()
            optimizer.step()
            numbers.append(states(model, optimizer))
        return numbers

    expected = run(None)
    with OffloadEngine(both(disk, overlap)) as engine:
        assert_same_history(run(engine), expected)
