"""Parameters, states and losses are the plain optimizer's to the last bit, at every step.

Clipping and GradScaler are in test_clipping.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import SGD, Adam, AdamW

from tests.optimizer.custom_optimizers import Lion
from tests.optimizer.runs import (
    EVERY_OVERLAP,
    OVERLAPS,
    MakeOptimizer,
    Run,
    compare,
    let_gradients_leave,
    loss_of,
    offloading,
)
from tests.training import in_turn


def _groups(model: nn.Module) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices[:3], "lr": 3e-2, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
        {"params": matrices[3:]},
    ]


def _of(kind: Any, *settings: Any, in_groups: bool = False, **options: Any) -> MakeOptimizer:
    return lambda m: kind(_groups(m) if in_groups else m.parameters(), *settings, **options)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adam amsgrad fused": _of(Adam, 1e-2, amsgrad=True, fused=True),
    "AdamW": _of(AdamW, 1e-2),
    "AdamW foreach": _of(AdamW, 1e-2, foreach=True),
    "AdamW fused": _of(AdamW, 1e-2, fused=True),
    "AdamW per tensor": _of(AdamW, 1e-2, foreach=False),
    "AdamW tensor lr fused": _of(AdamW, torch.tensor(1e-2), fused=True),
    "AdamW groups": _of(AdamW, 1e-2, in_groups=True),
    "SGD": _of(SGD, 0.1),
    "SGD momentum": _of(SGD, 0.1, momentum=0.9),
    "SGD momentum fused": _of(SGD, 0.1, momentum=0.9, fused=True),
    "SGD groups, maximize": _of(SGD, 0.1, in_groups=True, momentum=0.5, maximize=True),
    "NAdam": _of(optim.NAdam, 1e-2, weight_decay=0.1),
    "Adamax foreach groups": _of(optim.Adamax, 1e-2, in_groups=True, foreach=True),
    "Adagrad": _of(optim.Adagrad, 1e-2, initial_accumulator_value=0.1),
    "RMSprop centered foreach": _of(optim.RMSprop, 1e-3, centered=True, momentum=0.9, foreach=True),
    "Rprop": _of(optim.Rprop, 1e-2),
    "ASGD": _of(optim.ASGD, 1e-2, t0=2),
    "Adafactor": _of(optim.Adafactor, 1e-2),
    "Muon": lambda m: optim.Muon([p for p in m.parameters() if p.dim() == 2], 1e-2),
    "of somebody else's": _of(Lion, 1e-2),
}


def plain_loop(run: Run, late: bool = True) -> None:
    """Six steps; one parameter gets its first gradient in the fourth, if it comes late."""
    for number in range(6):
        run.optimizer.zero_grad(set_to_none=not late or number % 2 == 0)
        run.backward(number, extra=late and number >= 3)
        run.step()


#: `tests/conformance` has every option of every optimizer of torch.
@pytest.mark.parametrize(
    ("name", "host", "overlap"),
    [
        *((name, None, overlap) for name, overlap in in_turn(OPTIMIZERS, EVERY_OVERLAP)),
        *(("AdamW fused", *pair) for pair in product(("1KiB", "1MiB"), EVERY_OVERLAP)),
        ("SGD momentum", "1KiB", "commit"),
    ],
)
def test_six_steps_of(name: str, host: str | None, overlap: str, disk: Path) -> None:
    # Torch itself fails where the first gradient of a parameter comes late.
    script = partial(plain_loop, late=name != "SGD momentum fused")
    metrics = compare(script, OPTIMIZERS[name], disk, overlap, host)
    on_disk = metrics["offload/tier/nvme/used_bytes"]
    assert (on_disk > 0) == (name != "SGD" and host != "1MiB")
    if host is not None:
        assert metrics["offload/tier/host/used_bytes"] > 0


# ---------------------------------------------------------------------- other kinds of parameters
def _chain(dtype: torch.dtype) -> Callable[[Run], None]:
    """A chain of products in one dtype."""

    def script(run: Run) -> None:
        generator = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(6, 6, generator=generator).to(dtype)) for _ in range(4)]
        run.model = nn.ParameterList(weights)  # type: ignore[assignment]
        kinds = [AdamW(weights[:2], 1e-2), SGD(weights[2:], 1e-2, momentum=0.9)]
        optimizers = [run.wrap(optimizer) for optimizer in kinds]
        for number in range(4):
            run.model.zero_grad()
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(number)).to(dtype)
            for weight in weights:
                x = torch.tanh(x @ weight)
            x.abs().float().sum().backward()
            run.note(None, *optimizers)
            for optimizer in optimizers:
                optimizer.step()
            run.note(None, *optimizers)

    return script


def _sparse_gradients(run: Run) -> None:
    run.model = _sparse_model()
    run.optimizer = run.wrap(SGD(run.model.parameters(), 0.1))
    for number in range(4):
        run.optimizer.zero_grad()
        run.model(torch.tensor([number, 3, 3])).pow(2).sum().backward()
        run.step()


def _two_that_alternate(run: Run) -> None:
    """A generator and a discriminator; backward of one reaches the parameters of the other."""
    torch.manual_seed(0)
    makes = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16))
    judges = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    run.model = nn.ModuleList([makes, judges])  # type: ignore[assignment]
    first = run.wrap(Adam(makes.parameters(), 1e-3), makes)
    second = run.wrap(AdamW(judges.parameters(), 1e-3, fused=True), judges)
    for step in range(8):
        generator = torch.Generator().manual_seed(step)
        noise = torch.randn(4, 8, generator=generator)
        second.zero_grad()
        lost = (judges(makes(noise).detach()) - judges(torch.randn(4, 16))).mean()
        lost.backward()
        second.step()
        first.zero_grad()
        # What the judge learns from this is never used: it must not be updated by it.
        judges.requires_grad_(False)
        won = -judges(makes(noise)).mean()
        won.backward()
        judges.requires_grad_(True)
        first.step()
        run.note(lost + won, first, second)


def _sparse_model() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_update_that_the_optimizer_refuses_is_refused_at_step(overlap: str, disk: Path) -> None:
    def script(run: Run) -> None:
        model = _sparse_model()
        optimizer = run.wrap(Adam(model.parameters(), 0.1))
        model(torch.tensor([1, 3, 3])).pow(2).sum().backward()
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            optimizer.step()
        for number in range(3):  # it goes on working for the others
            model.zero_grad()
            model[1](torch.full((2, 4), float(number))).pow(2).sum().backward()
            optimizer.step()

    script(Run())
    with offloading(disk, overlap) as engine:
        script(Run(None, engine))


# ---------------------------------------------------------------------- orders of doing things
def _accumulate(hints: bool, groups: tuple[int, ...] = (3, 3, 1, 3)) -> Callable[[Run], None]:
    def script(run: Run) -> None:
        number = 0
        for micro_batches in groups:
            run.optimizer.zero_grad()
            for index in range(micro_batches):
                if hints:
                    run.hint(index, last=index == micro_batches - 1)
                (loss_of(run.model, number) / micro_batches).backward()
                number += 1
                if not run.eager:
                    run.note()
            run.step()

    return script


def _wrong_hints(run: Run) -> None:
    for number in range(5):
        run.optimizer.zero_grad()
        run.hint(0, last=True)
        run.backward(number)
        run.hint(1, last=False)
        run.backward(number + 10)
        run.step()


def _edit(edit: Callable[[Any], Any]) -> Callable[[Run], None]:
    def script(run: Run) -> None:
        for number in range(6):
            run.optimizer.zero_grad()
            run.backward(number, extra=True)
            if number in (1, 5):
                edit(run.model.first.weight)
                edit(run.model.embedding.weight)
            run.step()

    return script


#: The last three of them increment no version counter.
EDITS: dict[str, Callable[[Any], Any]] = {
    "gradients changed through views": lambda p: p.grad[0].zero_(),
    "gradients replaced": lambda p: setattr(p, "grad", p.grad * 2),
    "gradients replaced by transposed ones": lambda p: setattr(
        p, "grad", p.grad.t().contiguous().t()
    ),
    "gradients replaced by equal ones": lambda p: setattr(p, "grad", p.grad.clone()),
    "gradients copied with the model": lambda p: copy.deepcopy(p),
    "gradients dropped": lambda p: setattr(p, "grad", None),
    "p.grad.data.mul_": lambda p: p.grad.data.mul_(0.5),
    "p.grad.numpy()": lambda p: np.multiply(p.grad.numpy(), 2, out=p.grad.numpy()),
    "p.data.mul_": lambda p: p.data.mul_(0.9),
}


def _some_inputs_only(run: Run) -> None:
    for number in range(4):
        run.optimizer.zero_grad()
        chosen = [run.model.first.weight, run.model.scale]
        loss_of(run.model, number).backward(inputs=chosen)
        run.step()
        run.backward(number)
        run.step()


def _checkpointed(reentrant: bool, outside: bool = False) -> Callable[[Run], None]:
    from torch.utils.checkpoint import checkpoint

    def script(run: Run) -> None:
        model = run.model
        for number in range(4):
            run.optimizer.zero_grad()
            x = model.embedding(torch.arange(4) + number).detach().requires_grad_()
            for _ in range(2):  # the same parameters in two regions
                region = nn.Sequential(model.first, nn.GELU(), model.norm, model.tied)
                x = checkpoint(region, x, use_reentrant=reentrant)
            if outside:  # and without one, earlier and later
                x = checkpoint(region, model.tied(model.first(x)), use_reentrant=reentrant)
            (x * model.scale).pow(2).sum().backward()
            run.step()

    return script


def _closure(run: Run) -> None:
    for number in range(5):

        def closure(number: int = number) -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = loss_of(run.model, number)
            loss.backward()
            return loss

        run.note(run.optimizer.step(closure))
        run.note()


def _freeze_and_unfreeze(run: Run) -> None:
    for number in range(8):
        run.optimizer.zero_grad()
        if number == 2:
            run.model.frozen.requires_grad_(True)
        if number == 4:
            run.model.first.requires_grad_(False)
        if number == 6:
            run.model.first.requires_grad_(True)
        run.backward(number)
        if number == 3:
            run.model.norm.requires_grad_(False)  # it has a gradient, so it is updated
        run.step()
        run.model.norm.requires_grad_(True)


def _users_hook_after_ours(run: Run) -> None:
    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    run.model.first.weight.register_post_accumulate_grad_hook(halve)
    run.model.tied.weight.register_hook(lambda grad: grad * 2)
    plain_loop(run)


def _flat_gradients(run: Run) -> None:
    """Gradients that are views of one buffer, scaled through the buffer."""
    trained = [p for p in run.model.parameters() if p.requires_grad]
    flat = torch.zeros(sum(p.numel() for p in trained))
    for number in range(5):
        flat.zero_()
        offset = 0
        for parameter in trained:
            parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        run.backward(number)
        if number % 2:
            flat.mul_(0.25)
        run.step()


def _one_gradient_by_hand(run: Run) -> None:
    for number in range(4):
        run.optimizer.zero_grad()
        run.backward(number)
        run.model.unused.weight.grad = torch.full((3, 3), 0.5)
        run.step()


def _converted_and_back(run: Run) -> None:
    for number in range(3):
        run.optimizer.zero_grad()
        run.backward(number)
        run.model.double().float()
        run.step()


def _graph_over_gradients(run: Run) -> None:
    model = run.model
    for number in range(3):
        run.optimizer.zero_grad()
        run.backward(number)
        # Accumulates out of place, and what comes out has a history.
        loss_of(model, number + 1).backward(create_graph=True)
        penalty = sum(p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None)
        model.zero_grad()
        assert isinstance(penalty, torch.Tensor)
        penalty.backward()
        run.step()


def _loss_of_gradients(run: Run) -> None:
    run.backward(0)
    gradient = run.model.first.weight.grad
    assert gradient is not None
    weight = torch.full((), 0.5, requires_grad=True)
    (weight * gradient).pow(2).sum().backward()
    assert weight.grad is not None
    run.note(weight.grad)
    loss = (weight * gradient).sum()
    gradient.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    run.step()


DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.complex64]
SCRIPTS: dict[str, Callable[[Run], None]] = {
    **{name: _edit(edit) for name, edit in EDITS.items()},
    "accumulation without hints": _accumulate(hints=False),
    "accumulation with hints": _accumulate(hints=True),
    "wrong hints": _wrong_hints,
    "gradients in one buffer": _flat_gradients,
    "gradients of some parameters": _some_inputs_only,
    "reentrant checkpoints": _checkpointed(True),
    "reentrant checkpoints of parameters that are used outside as well": _checkpointed(True, True),
    "non-reentrant checkpoints": _checkpointed(False),
    "closures": _closure,
    "one gradient set by hand": _one_gradient_by_hand,
    "freezing and unfreezing": _freeze_and_unfreeze,
    "hooks of the user's own": _users_hook_after_ours,
    "models that are converted": _converted_and_back,
    "graphs over gradients": _graph_over_gradients,
    "losses of gradients": _loss_of_gradients,
    "sparse gradients": _sparse_gradients,
    "two optimizers that alternate": _two_that_alternate,
    **{f"parameters of {dtype}": _chain(dtype) for dtype in DTYPES},
}


#: Scripts that neither read nor change gradients, and step after every last backward.
EAGER_SCRIPTS = [
    "accumulation with hints",
    "non-reentrant checkpoints",
    "closures",
    "one gradient set by hand",
    "freezing and unfreezing",
    "two optimizers that alternate",
]


@pytest.mark.parametrize(
    ("name", "overlap"),
    [
        *((name, "commit") for name in SCRIPTS),
        *in_turn(SCRIPTS, ["off", "commit, on the disk"]),
        *((name, "eager") for name in EAGER_SCRIPTS),
    ],
)
def test_the_same_numbers_with(
    name: str, overlap: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if overlap == "commit, on the disk":
        let_gradients_leave(monkeypatch)
        overlap = "commit"
    compare(SCRIPTS[name], OPTIMIZERS["AdamW fused"], disk, overlap)
