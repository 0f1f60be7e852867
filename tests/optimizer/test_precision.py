"""Stored dtypes, stochastic rounding, master weights and updates in chunks, bit by bit."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import ASGD, SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from offload_strategy.optimizer import subgroup_update
from offload_strategy.optimizer.states.precision import MASTER_WEIGHT, Precision, copy_rounded
from offload_strategy.optimizer.user_class import inner_step
from offload_strategy.optimizer.user_class.compatibility import check_supported
from tests.optimizer.runs import EVERY_OVERLAP, Run, adamw, offloading, snapshot
from tests.training import Numbers, assert_same_bits, assert_same_history, in_turn

Make = Callable[[Iterable[torch.Tensor]], Optimizer]


class LateState(SGD):
    """Adds another state in its second update."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state["updates"] = state.get("updates", 0) + 1
                if state["updates"] == 2:
                    state["late"] = 2 * weight.detach()


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: AdamW(p, 1e-3),
    "AdamW fused": lambda p: AdamW(p, 1e-3, fused=True),
    "Adam foreach amsgrad": lambda p: Adam(p, 1e-3, foreach=True, amsgrad=True),
    "NAdam": lambda p: NAdam(p, 1e-3),
    "Adagrad": lambda p: Adagrad(p, 1e-3),
    "SGD momentum": lambda p: SGD(p, 0.01, momentum=0.9),
    "SGD": lambda p: SGD(p, 0.01),
    "RMSprop": lambda p: RMSprop(p, 1e-3, momentum=0.9, centered=True),
    "ASGD": lambda p: ASGD(p, 1e-3),
    "a state that comes late": lambda p: LateState(p, 0.01, momentum=0.9),
}
MASTERS = {"master_weights": True}
BFLOAT16 = {"state_dtype": "bfloat16"}
STEPS = 6


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 160), nn.GELU(), nn.Linear(160, 8)).to(dtype)


def backward(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    dtype = next(model.parameters()).dtype
    model.zero_grad()
    x = torch.randn(12, 24, generator=generator).to(dtype)
    model(x).float().pow(2).mean().backward()


class Reference:
    """A model that a plain optimizer trains, in float32 copies or with rounded states if wanted."""

    def __init__(self, make: Make, dtype: torch.dtype, section: dict[str, Any]) -> None:
        self.model = make_model(dtype)
        self.has_masters = "master_weights" in section and dtype.itemsize == 2
        self.rounds = "state_dtype" in section and (self.has_masters or dtype is torch.float32)
        self.masters = list(self.model.parameters())
        if self.has_masters:
            self.masters = [nn.Parameter(p.detach().float()) for p in self.masters]
        self.optimizer = make(self.masters)

    @torch.no_grad()
    def step(self) -> None:
        pairs = list(zip(self.model.parameters(), self.masters, strict=True))
        for parameter, master in pairs:
            assert parameter.grad is not None
            # Where somebody has changed the weight, it counts; elsewhere the copy has more bits.
            changed = master.to(parameter.dtype) != parameter
            master.data[changed] = parameter[changed].to(master.dtype)
            master.grad = parameter.grad.to(master.dtype)
        self.optimizer.step()
        for parameter, master in pairs:
            parameter.copy_(master)
        if self.rounds:
            round_states(self.optimizer)

    def numbers(self) -> Numbers:
        found = snapshot(self.model, gradients=False)
        for (name, _), master in zip(self.model.named_parameters(), self.masters, strict=True):
            state = dict(self.optimizer.state[master])
            if self.has_masters:
                state[MASTER_WEIGHT] = master.detach()
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"{name}.state0.{key}"] = value.clone()
        return found


def round_states(optimizer: Optimizer) -> None:
    """Round a plain optimizer's states as storing them in bfloat16 does."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[name] = value.to(torch.bfloat16).to(value.dtype)


def of(model: nn.Module, optimizer: Optimizer) -> Numbers:
    return snapshot(model, optimizer, gradients=False)


# ---------------------------------------------------------------------- exactness
SECTIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bfloat16 states": (torch.float32, BFLOAT16),
    "bfloat16 masters": (torch.bfloat16, MASTERS),
    "float16 masters": (torch.float16, MASTERS),
    "bfloat16 states and masters": (torch.bfloat16, {**MASTERS, **BFLOAT16}),
}
#: The others take turns with one of these each.
IN_ALL_SECTIONS = ["AdamW fused", "Adam foreach amsgrad", "RMSprop", "a state that comes late"]
#: Only float32 states are rounded, and only half weights have masters.
WITHOUT_EFFECT: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float64 states": (torch.float64, BFLOAT16),
    "bfloat16 weights": (torch.bfloat16, BFLOAT16),
    "float16 weights": (torch.float16, BFLOAT16),
    "float32 masters": (torch.float32, MASTERS),
}


@pytest.mark.parametrize(
    ("name", "overlap", "which"),
    [
        *(
            (name, overlap, which)
            for (name, which), overlap in in_turn(
                [
                    *product(IN_ALL_SECTIONS, SECTIONS),
                    *in_turn(sorted(OPTIMIZERS.keys() - IN_ALL_SECTIONS), list(SECTIONS)),
                ],
                EVERY_OVERLAP,
            )
        ),
        *(("AdamW", "commit", which) for which in WITHOUT_EFFECT),
    ],
)
def test_six_steps_of(
    name: str, overlap: str, which: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights that somebody changes between steps, and a checkpoint in the middle."""
    monkeypatch.setattr(inner_step, "CHUNK_ELEMENTS", 256)
    dtype, section = {**SECTIONS, **WITHOUT_EFFECT}[which]
    reference, file = Reference(OPTIMIZERS[name], dtype, section), io.BytesIO()
    for first in (0, STEPS // 2):
        model = make_model(dtype)
        # Subgroups that are larger than a chunk.
        with offloading(disk, overlap, optimizer={**section, "subgroup_size": 1000}) as engine:
            optimizer = engine.attach(None, OPTIMIZERS[name](model.parameters()))
            if first:
                saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            for number in range(first, first + STEPS // 2):
                if number == 1:
                    for one in (reference.model, model):
                        one[0].weight.data.clamp_(-0.05, 0.05)
                backward(reference.model, number)
                reference.step()
                backward(model, number)
                optimizer.step()
                assert_same_bits(of(model, optimizer), reference.numbers())
            states = optimizer.state_dict()
            torch.save({"model": model.state_dict(), "optimizer": states}, file)
    plain = OPTIMIZERS[name](model.parameters())
    plain.load_state_dict(states)  # it keeps the master weights that it does not know
    assert (MASTER_WEIGHT in plain.state_dict()["state"].get(0, {})) == reference.has_masters


def _train(run: Run, clip: float | None = None) -> None:
    for number in range(6):
        run.optimizer.zero_grad()
        loss = run.backward(number)
        if clip is not None:
            nn.utils.clip_grad_norm_(run.model.parameters(), clip)
        run.optimizer.step()
        if run.engine is None:
            round_states(run.optimizer)
        run.note(loss)


@pytest.mark.parametrize(
    ("overlap", "clip", "host"),
    [("commit", None, "1MiB"), ("commit", 0.1, None), ("off", 0.1, None)],
)
def test_bfloat16_states_of_many_kinds_of_parameters(
    overlap: str, clip: float | None, host: str | None, disk: Path
) -> None:
    plain = Run(adamw)
    _train(plain, clip)
    with offloading(disk, overlap, host, optimizer=BFLOAT16) as engine:
        offloaded = Run(adamw, engine)
        _train(offloaded, clip)
    assert_same_history(offloaded.history, plain.history)


# ---------------------------------------------------------------------- sizes
def test_bfloat16_states_move_half_of_the_bytes(disk: Path) -> None:
    moved = {}
    for dtype in ("float32", "bfloat16"):
        parameter = nn.Parameter(torch.ones(64, 64))
        whole = {"state_dtype": dtype, "subgroup_size": 10_000}
        with offloading(disk, "off", optimizer=whole) as engine:
            optimizer = engine.attach(None, Adam([parameter]))
            for _ in range(3):
                parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                # The next step would cancel a write that is not finished.
                engine._resources.store.wait_for_writes()
            assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32
            moved[dtype] = engine.metrics()["offload/optimizer/written_bytes"]
    assert moved["float32"] == 3 * 2 * parameter.numel() * 4
    assert moved["bfloat16"] == moved["float32"] / 2


@pytest.mark.parametrize(
    ("weights", "precision", "per_element"),
    [
        (torch.float32, Precision(), 8),
        (torch.float32, Precision(state_dtype=torch.bfloat16), 4),
        (torch.bfloat16, Precision(), 4),
        (torch.bfloat16, Precision(state_dtype=torch.bfloat16), 4),
        (torch.bfloat16, Precision(master_weights=True), 12),
        (torch.bfloat16, Precision(state_dtype=torch.bfloat16, master_weights=True), 8),
    ],
)
def test_state_bytes(weights: torch.dtype, precision: Precision, per_element: int) -> None:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=weights)) for shape in ((30, 8), (64,))]
    assert check_supported(AdamW(parameters), precision).state_bytes == [304 * per_element]


# ---------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Adam foreach amsgrad", "SGD momentum"])
def test_loading_casts_states_as_a_plain_optimizer_does(
    name: str, own: torch.dtype, stored: torch.dtype, disk: Path
) -> None:
    source = make_model(stored)
    giver = OPTIMIZERS[name](source.parameters())
    backward(source, 0)
    giver.step()
    plain, model = make_model(own), make_model(own)
    expected = OPTIMIZERS[name](plain.parameters())
    expected.load_state_dict(giver.state_dict())
    with offloading(disk) as engine:
        optimizer = engine.attach(None, OPTIMIZERS[name](model.parameters()))
        optimizer.load_state_dict(giver.state_dict())
        assert_same_bits(of(model, optimizer), of(plain, expected))
        for one, its in ((plain, expected), (model, optimizer)):
            backward(one, 1)
            its.step()
        assert_same_bits(of(model, optimizer), of(plain, expected))


# ---------------------------------------------------------------------- failures
@pytest.mark.parametrize("section", [BFLOAT16, MASTERS], ids=["bfloat16 states", "masters"])
def test_an_update_that_fails_between_chunks_loses_no_state(
    section: dict[str, Any], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_step, "CHUNK_ELEMENTS", 512)
    dtype = torch.bfloat16 if section is MASTERS else torch.float32
    parameter = nn.Parameter(torch.ones(64, 64, dtype=dtype))

    def step() -> None:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    with offloading(disk, "off", optimizer={**section, "subgroup_size": 10_000}) as engine:
        optimizer = engine.attach(None, AdamW([parameter], 1e-2))
        for _ in range(2):
            step()
        before = optimizer.state[parameter]
        real, calls = inner_step.run_update, []

        def fail_in_the_second(*args: Any) -> None:
            calls.append(args)
            if len(calls) == 2:
                raise LookupError("refused")
            real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(subgroup_update, "run_update", fail_in_the_second)
            with pytest.raises(LookupError, match="refused"):
                step()
        kept = optimizer.state[parameter]
        assert kept.keys() == before.keys()
        # The first chunk is updated, the others are as they were.
        for name in ("exp_avg", *((MASTER_WEIGHT,) if section is MASTERS else ())):
            assert not torch.equal(kept[name][:8], before[name][:8])
            assert torch.equal(kept[name][8:], before[name][8:])
        assert kept["step"] == before["step"]
        step()
        assert optimizer.state[parameter]["step"] == before["step"] + 1
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32


# ---------------------------------------------------------------------- stochastic rounding
def _rounded(value: float, update: int, count: int = 4096) -> torch.Tensor:
    stored = torch.empty(count, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(update)
    copy_rounded(stored, torch.full((count,), value), generator)
    return stored


def test_stochastic_rounding_keeps_the_mean() -> None:
    value = 1.0 + 0.3 / 128  # three tenths of a step above 1
    stored = _rounded(value, 0)
    assert set(stored.tolist()) == {1.0, 1.0 + 1 / 128}
    share = (stored > 1).float().mean().item()
    assert abs(share - 0.3) < 0.04  # five standard deviations
    assert torch.equal(stored, _rounded(value, 0))
    assert not torch.equal(stored, _rounded(value, 1))


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, *map(float, ("inf", "-inf", "nan")), 2.0**-130])
def test_values_of_bfloat16_are_not_rounded(value: float) -> None:
    exact = torch.full((4096,), value).to(torch.bfloat16)
    assert torch.equal(_rounded(exact[0].item(), 0).view(torch.int16), exact.view(torch.int16))


def test_small_changes_add_up_only_with_stochastic_rounding(disk: Path) -> None:
    """An average that decays by a thousandth a step, which is less than a step of bfloat16."""
    left = {}
    for stochastic in (False, True):
        parameter = nn.Parameter(torch.zeros(100, 100))
        options = {**BFLOAT16, "stochastic_rounding": stochastic, "subgroup_size": "auto"}
        state = torch.get_rng_state()
        with offloading(disk, optimizer=options) as engine:
            optimizer = engine.attach(None, SGD([parameter], 0.0, momentum=0.999))
            for number in range(100):
                optimizer.zero_grad()
                (parameter * (1.0 if number == 0 else 0.0)).sum().backward()
                optimizer.step()
            left[stochastic] = optimizer.state[parameter]["momentum_buffer"].mean().item()
        assert torch.equal(torch.get_rng_state(), state)
    assert left[False] == 1.0
    assert abs(left[True] - 0.999**99) < 0.01
