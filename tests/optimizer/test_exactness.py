"""Parameters, states and losses are the plain optimizer's to the last bit, at every step.

Clipping and GradScaler are in test_clipping.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from tests.optimizer.custom_optimizers import Lion
from tests.optimizer.runs import (
    EVERY_OVERLAP,
    OVERLAPS,
    MakeOptimizer,
    Run,
    compare,
    loss_of,
    offloading,
)


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
    "Adam": _of(Adam, 1e-2),
    "Adam foreach": _of(Adam, 1e-2, foreach=True),
    "Adam amsgrad fused": _of(Adam, 1e-2, amsgrad=True, fused=True),
    "Adam weight decay, maximize": _of(Adam, 1e-2, weight_decay=0.1, maximize=True),
    "AdamW": _of(AdamW, 1e-2),
    "AdamW foreach": _of(AdamW, 1e-2, foreach=True),
    "AdamW fused": _of(AdamW, 1e-2, fused=True),
    "AdamW per tensor": _of(AdamW, 1e-2, foreach=False),
    "AdamW amsgrad foreach": _of(AdamW, 1e-2, amsgrad=True, foreach=True, maximize=True),
    "AdamW tensor lr": _of(AdamW, torch.tensor(1e-2)),
    "AdamW tensor lr fused": _of(AdamW, torch.tensor(1e-2), fused=True),
    "AdamW groups": _of(AdamW, 1e-2, in_groups=True),
    "AdamW groups fused": _of(AdamW, 1e-2, in_groups=True, fused=True),
    "AdamW named": lambda m: AdamW(m.named_parameters(), 1e-2),
    "SGD": _of(SGD, 0.1),
    "SGD fused": _of(SGD, 0.1, fused=True),
    "SGD momentum": _of(SGD, 0.1, momentum=0.9),
    "SGD momentum foreach": _of(SGD, 0.1, momentum=0.9, foreach=True),
    "SGD momentum fused": _of(SGD, 0.1, momentum=0.9, fused=True),
    "SGD dampening": _of(SGD, 0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD nesterov": _of(SGD, 0.1, momentum=0.9, nesterov=True),
    "SGD groups, maximize": _of(SGD, 0.1, in_groups=True, momentum=0.5, maximize=True),
    "NAdam": _of(NAdam, 1e-2, weight_decay=0.1),
    "NAdam foreach": _of(NAdam, 1e-2, weight_decay=0.1, decoupled_weight_decay=True, foreach=True),
    "RAdam": _of(RAdam, 1e-2),
    "RAdam foreach": _of(RAdam, 1e-2, foreach=True),
    "Adamax": _of(Adamax, 1e-2),
    "Adamax foreach groups": _of(Adamax, 1e-2, in_groups=True, foreach=True),
    "Adadelta": _of(Adadelta),
    "Adagrad": _of(Adagrad, 1e-2, initial_accumulator_value=0.1),
    "Adagrad fused": _of(Adagrad, 1e-2, fused=True),
    "Adagrad groups": _of(Adagrad, 1e-2, in_groups=True, lr_decay=0.1),
    "RMSprop": _of(RMSprop, 1e-3),
    "RMSprop centered foreach": _of(RMSprop, 1e-3, centered=True, momentum=0.9, foreach=True),
    "Rprop": _of(Rprop, 1e-2),
    "Rprop foreach": _of(Rprop, 1e-2, foreach=True),
    "ASGD": _of(ASGD, 1e-2, t0=2),
    "ASGD foreach": _of(ASGD, 1e-2, t0=2, foreach=True),
    "Adafactor": _of(Adafactor, 1e-2),
    "Adafactor foreach groups": _of(Adafactor, 1e-2, in_groups=True, foreach=True),
    "Muon": lambda m: Muon([p for p in m.parameters() if p.dim() == 2], 1e-2),
    "a subclass": _of(type("Mine", (AdamW,), {}), 1e-2),
    "of somebody else's": _of(Lion, 1e-2),
}


def plain_loop(run: Run, late: bool = True) -> None:
    """Six steps; one parameter gets its first gradient in the fourth, if it comes late."""
    for number in range(6):
        run.optimizer.zero_grad(set_to_none=not late or number % 2 == 0)
        run.backward(number, extra=late and number >= 3)
        run.step()


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_six_steps_of(name: str, overlap: str, disk: Path) -> None:
    # Torch itself fails where the first gradient of a parameter comes late.
    script = partial(plain_loop, late=name != "SGD momentum fused")
    metrics = compare(script, OPTIMIZERS[name], disk, overlap)
    if name not in ("SGD", "SGD fused"):  # the others have states
        assert metrics["offload/optimizer/written_bytes"] > 0


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
@pytest.mark.parametrize("host", ["1KiB", "3KiB", "1MiB"])
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD momentum"])
def test_six_steps_partly_in_host_memory_of(name: str, host: str, overlap: str, disk: Path) -> None:
    metrics = compare(plain_loop, OPTIMIZERS[name], disk, overlap, host)
    on_disk = metrics["offload/tier/nvme/used_bytes"]
    in_memory = metrics["offload/tier/host/used_bytes"]
    assert in_memory > 0
    if host == "1MiB":
        assert on_disk == metrics["offload/endurance/written_bytes"] == 0
    else:
        assert on_disk > 0


# ---------------------------------------------------------------------- other kinds of parameters
class Plain(nn.Module):
    """A chain of products in one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            torch.randn(6, 6, generator=generator).to(dtype) for _ in range(4)
        )

    def forward(self, number: int) -> torch.Tensor:
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(number))
        x = x.to(self.weights[0].dtype)
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x.abs().float().sum()


DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_parameters_of(kind: type[Optimizer], dtype: torch.dtype, overlap: str, disk: Path) -> None:
    options = {"momentum": 0.9} if kind is SGD else {}

    def script(run: Run) -> None:
        run.model = Plain(dtype)  # type: ignore[assignment]
        run.optimizer = run.wrap(kind(run.model.parameters(), lr=1e-2, **options))  # type: ignore[arg-type]
        for number in range(4):
            run.optimizer.zero_grad()
            run.model(number).backward()
            run.step()

    compare(script, None, disk, overlap)


def _sparse_model() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_sparse_gradients_are_used_as_they_are(overlap: str, disk: Path) -> None:
    def script(run: Run) -> None:
        run.model = _sparse_model()
        run.optimizer = run.wrap(SGD(run.model.parameters(), 0.1))
        for number in range(4):
            run.optimizer.zero_grad()
            run.model(torch.tensor([number, 3, 3])).pow(2).sum().backward()
            run.step()

    compare(script, None, disk, overlap)


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


@torch.no_grad()
def _edit_weight(parameter: nn.Parameter) -> None:
    parameter.mul_(0.9)


#: The last four of them increment no version counter.
EDITS: dict[str, Callable[[Any], Any]] = {
    "gradients changed in place": lambda p: p.grad.mul_(3),
    "gradients changed by foreach": lambda p: torch._foreach_mul_([p.grad], 0.5),
    "gradients changed through views": lambda p: p.grad[0].zero_(),
    "gradients replaced": lambda p: setattr(p, "grad", p.grad * 2),
    "gradients replaced by equal ones": lambda p: setattr(p, "grad", p.grad.clone()),
    "gradients dropped": lambda p: setattr(p, "grad", None),
    "weights changed before the step": _edit_weight,
    "p.grad.data.mul_": lambda p: p.grad.data.mul_(0.5),
    "p.grad.data.clamp_": lambda p: p.grad.data.clamp_(-0.01, 0.01),
    "p.grad.numpy()": lambda p: np.multiply(p.grad.numpy(), 2, out=p.grad.numpy()),
    "p.data.mul_": lambda p: p.data.mul_(0.9),
}


def _hyper(change: Callable[[dict[str, object]], None]) -> Callable[[Run], None]:
    def script(run: Run) -> None:
        for number in range(5):
            run.optimizer.zero_grad()
            run.backward(number)
            if number == 2:
                for group in run.optimizer.param_groups:
                    change(group)
            run.step()

    return script


def _step_twice(run: Run) -> None:
    for number in range(3):
        run.optimizer.zero_grad()
        run.backward(number)
        run.step()
        run.step()


def _backward_twice(run: Run) -> None:
    for number in range(3):
        run.optimizer.zero_grad()
        loss = loss_of(run.model, number)
        loss.backward(retain_graph=True)
        run.note()
        loss.backward()
        run.step()


def _step_without_gradients(run: Run) -> None:
    run.step()
    run.backward(0)
    run.optimizer.zero_grad()
    run.step()
    run.backward(1)
    run.step()
    run.optimizer.zero_grad(set_to_none=False)
    run.step()


def _skipped_steps(run: Run) -> None:
    for number in range(6):
        run.model.zero_grad()
        run.backward(number)
        if number % 2:
            run.step()


def _some_inputs_only(run: Run) -> None:
    for number in range(4):
        run.optimizer.zero_grad()
        chosen = [run.model.first.weight, run.model.scale]
        loss_of(run.model, number).backward(inputs=chosen)
        run.step()
        run.backward(number)
        run.step()


def _gradients_by_hand(run: Run) -> None:
    for number in range(4):
        run.optimizer.zero_grad()
        trained = [p for p in run.model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss_of(run.model, number), trained, allow_unused=True)
        for parameter, grad in zip(trained, grads, strict=True):
            parameter.grad = grad
        run.step()


def _checkpointed(reentrant: bool) -> Callable[[Run], None]:
    from torch.utils.checkpoint import checkpoint

    def script(run: Run) -> None:
        model = run.model
        for number in range(4):
            run.optimizer.zero_grad()
            x = model.embedding(torch.arange(4) + number).detach().requires_grad_()
            for _ in range(2):  # the same parameters in two regions
                region = nn.Sequential(model.first, nn.GELU(), model.norm, model.tied)
                x = checkpoint(region, x, use_reentrant=reentrant)
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


def _scaled_by_hand(run: Run) -> None:
    scale = 2.0**10
    for number in range(6):
        run.optimizer.zero_grad()
        (loss_of(run.model, number) * scale * (float("inf") if number == 3 else 1)).backward()
        finite = True
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
                finite = finite and bool(parameter.grad.isfinite().all())
        if finite:
            run.step()
        else:
            scale /= 2


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


def _cleared_by_the_model(run: Run) -> None:
    for number in range(5):
        run.model.zero_grad()
        run.backward(number)
        run.step()


def _one_gradient_by_hand(run: Run) -> None:
    for number in range(4):
        run.optimizer.zero_grad()
        run.backward(number)
        run.model.unused.weight.grad = torch.full((3, 3), 0.5)
        run.step()


SCRIPTS: dict[str, Callable[[Run], None]] = {
    **{name: _edit(edit) for name, edit in EDITS.items()},
    "accumulation without hints": _accumulate(hints=False),
    "accumulation with hints": _accumulate(hints=True),
    "wrong hints": _wrong_hints,
    "gradients in one buffer": _flat_gradients,
    "a learning rate changed before the step": _hyper(lambda g: g.update(lr=0.5)),
    "betas changed before the step": _hyper(lambda g: g.update(betas=(0.5, 0.9))),
    "two steps with the same gradients": _step_twice,
    "two backwards of the same graph": _backward_twice,
    "steps without gradients": _step_without_gradients,
    "skipped steps": _skipped_steps,
    "gradients of some parameters": _some_inputs_only,
    "gradients set by hand": _gradients_by_hand,
    "reentrant checkpoints": _checkpointed(True),
    "non-reentrant checkpoints": _checkpointed(False),
    "closures": _closure,
    "gradients cleared by the model": _cleared_by_the_model,
    "one gradient set by hand": _one_gradient_by_hand,
    "freezing and unfreezing": _freeze_and_unfreeze,
    "losses scaled by hand": _scaled_by_hand,
    "hooks of the user's own": _users_hook_after_ours,
}


#: Scripts that neither read nor change gradients, and step after every last backward.
EAGER_SCRIPTS = [
    "accumulation with hints",
    "non-reentrant checkpoints",
    "closures",
    "gradients cleared by the model",
    "one gradient set by hand",
    "freezing and unfreezing",
]


@pytest.mark.parametrize(
    ("name", "overlap"),
    [
        *((name, overlap) for name in SCRIPTS for overlap in OVERLAPS),
        *((name, "eager") for name in EAGER_SCRIPTS),
    ],
)
def test_the_same_numbers_with(name: str, overlap: str, disk: Path) -> None:
    compare(SCRIPTS[name], OPTIMIZERS["AdamW fused"], disk, overlap)
