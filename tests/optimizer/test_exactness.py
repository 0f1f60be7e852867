"""Parameters, states and losses are the plain optimizer's to the last bit, at every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adam": lambda m: Adam(m.parameters(), 1e-2),
    "Adam foreach": lambda m: Adam(m.parameters(), 1e-2, foreach=True),
    "Adam fused": lambda m: Adam(m.parameters(), 1e-2, fused=True),
    "Adam amsgrad": lambda m: Adam(m.parameters(), 1e-2, amsgrad=True),
    "Adam amsgrad fused": lambda m: Adam(m.parameters(), 1e-2, amsgrad=True, fused=True),
    "Adam weight decay, maximize": lambda m: Adam(
        m.parameters(), 1e-2, weight_decay=0.1, maximize=True
    ),
    "AdamW": lambda m: AdamW(m.parameters(), 1e-2),
    "AdamW foreach": lambda m: AdamW(m.parameters(), 1e-2, foreach=True),
    "AdamW fused": lambda m: AdamW(m.parameters(), 1e-2, fused=True),
    "AdamW per tensor": lambda m: AdamW(m.parameters(), 1e-2, foreach=False),
    "AdamW amsgrad foreach maximize": lambda m: AdamW(
        m.parameters(), 1e-2, amsgrad=True, foreach=True, maximize=True
    ),
    "AdamW tensor lr": lambda m: AdamW(m.parameters(), torch.tensor(1e-2)),
    "AdamW tensor lr fused": lambda m: AdamW(m.parameters(), torch.tensor(1e-2), fused=True),
    "AdamW groups": lambda m: AdamW(_groups(m), 1e-2),
    "AdamW groups fused": lambda m: AdamW(_groups(m), 1e-2, fused=True),
    "AdamW named": lambda m: AdamW(m.named_parameters(), 1e-2),
    "SGD": lambda m: SGD(m.parameters(), 0.1),
    "SGD fused": lambda m: SGD(m.parameters(), 0.1, fused=True),
    "SGD momentum": lambda m: SGD(m.parameters(), 0.1, momentum=0.9),
    "SGD momentum foreach": lambda m: SGD(m.parameters(), 0.1, momentum=0.9, foreach=True),
    "SGD momentum fused": lambda m: SGD(m.parameters(), 0.1, momentum=0.9, fused=True),
    "SGD dampening, weight decay": lambda m: SGD(
        m.parameters(), 0.1, momentum=0.9, dampening=0.1, weight_decay=0.01
    ),
    "SGD nesterov": lambda m: SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True),
    "SGD maximize": lambda m: SGD(m.parameters(), 0.1, momentum=0.5, maximize=True),
    "SGD groups": lambda m: SGD(_groups(m), 0.1, momentum=0.9),
    "NAdam": lambda m: NAdam(m.parameters(), 1e-2, weight_decay=0.1),
    "NAdam foreach decoupled": lambda m: NAdam(
        m.parameters(), 1e-2, weight_decay=0.1, decoupled_weight_decay=True, foreach=True
    ),
    "RAdam": lambda m: RAdam(m.parameters(), 1e-2),
    "RAdam foreach": lambda m: RAdam(m.parameters(), 1e-2, foreach=True),
    "Adamax": lambda m: Adamax(m.parameters(), 1e-2),
    "Adamax foreach groups": lambda m: Adamax(_groups(m), 1e-2, foreach=True),
    "Adadelta": lambda m: Adadelta(m.parameters()),
    "Adagrad": lambda m: Adagrad(m.parameters(), 1e-2, initial_accumulator_value=0.1),
    "Adagrad fused": lambda m: Adagrad(m.parameters(), 1e-2, fused=True),
    "Adagrad groups": lambda m: Adagrad(_groups(m), 1e-2, lr_decay=0.1),
    "RMSprop": lambda m: RMSprop(m.parameters(), 1e-3),
    "RMSprop centered momentum foreach": lambda m: RMSprop(
        m.parameters(), 1e-3, centered=True, momentum=0.9, foreach=True
    ),
    "Rprop": lambda m: Rprop(m.parameters(), 1e-2),
    "Rprop foreach": lambda m: Rprop(m.parameters(), 1e-2, foreach=True),
    "ASGD": lambda m: ASGD(m.parameters(), 1e-2, t0=2),
    "ASGD foreach": lambda m: ASGD(m.parameters(), 1e-2, t0=2, foreach=True),
    "Adafactor": lambda m: Adafactor(m.parameters(), 1e-2),
    "Adafactor foreach groups": lambda m: Adafactor(_groups(m), 1e-2, foreach=True),
    "Muon": lambda m: Muon([p for p in m.parameters() if p.dim() == 2], 1e-2),
    "a subclass": lambda m: type("Mine", (AdamW,), {})(m.parameters(), 1e-2),
    "of somebody else's": lambda m: Lion(m.parameters(), 1e-2),
}


def plain_loop(run: Run) -> None:
    """Six steps; one parameter gets its first gradient in the fourth."""
    for number in range(6):
        run.optimizer.zero_grad(set_to_none=number % 2 == 0)
        run.backward(number, extra=number >= 3)
        run.step()


def early_loop(run: Run) -> None:
    """As `plain_loop`, with the same gradients in every step."""
    for number in range(6):
        run.optimizer.zero_grad()
        run.backward(number)
        run.step()


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_six_steps_of(name: str, overlap: str, disk: Path) -> None:
    # Torch itself fails where the first gradient of a parameter comes late.
    script = early_loop if name == "SGD momentum fused" else plain_loop
    metrics = compare(script, OPTIMIZERS[name], disk, overlap)
    stateless = name in ("SGD", "SGD fused")
    if not stateless:
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


def _many_steps(run: Run) -> None:
    for number in range(40):
        run.optimizer.zero_grad()
        loss = run.backward(number, extra=number % 7 == 3)
        if number % 5 == 4:
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.optimizer.step()
        run.note(loss)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_forty_steps_that_are_clipped_now_and_then(overlap: str, disk: Path) -> None:
    compare(_many_steps, OPTIMIZERS["AdamW groups"], disk, overlap)


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


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_sparse_gradients_are_used_as_they_are(overlap: str, disk: Path) -> None:
    def script(run: Run) -> None:
        model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3))
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        run.model = model  # type: ignore[assignment]
        run.optimizer = run.wrap(SGD(model.parameters(), 0.1))
        for number in range(4):
            run.optimizer.zero_grad()
            model(torch.tensor([number, 3, 3])).pow(2).sum().backward()
            run.step()

    compare(script, None, disk, overlap)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_update_that_the_optimizer_refuses_is_refused_at_step(overlap: str, disk: Path) -> None:
    def script(run: Run) -> None:
        model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3))
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        run.model = model  # type: ignore[assignment]
        run.optimizer = run.wrap(Adam(model.parameters(), 0.1))
        model(torch.tensor([1, 3, 3])).pow(2).sum().backward()
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            run.optimizer.step()
        for number in range(3):  # it goes on working for the others
            model.zero_grad()
            model[1](torch.full((2, 4), float(number))).pow(2).sum().backward()
            run.optimizer.step()

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


def _clip(threshold: float, norm: float = 2.0) -> Callable[[Run], None]:
    def script(run: Run) -> None:
        for number in range(6):
            run.optimizer.zero_grad()
            run.backward(number)
            total = nn.utils.clip_grad_norm_(run.model.parameters(), threshold, norm)
            run.note(total)
            run.step()

    return script


def _clip_values(run: Run) -> None:
    for number in range(5):
        run.optimizer.zero_grad()
        run.backward(number)
        nn.utils.clip_grad_value_(run.model.parameters(), 0.05)
        run.step()


def _edit(how: Callable[[nn.Parameter], None]) -> Callable[[Run], None]:
    def script(run: Run) -> None:
        for number in range(6):
            run.optimizer.zero_grad()
            run.backward(number, extra=True)
            if number in (1, 5):
                how(run.model.first.weight)
                how(run.model.embedding.weight)
            run.step()

    return script


@torch.no_grad()
def _edit_weight(parameter: nn.Parameter) -> None:
    parameter.mul_(0.9)


def _edit_new_gradient(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 2


def _drop_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = None


def _edit_view(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad[0].zero_()


def _edit_in_place(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


def _edit_foreach(parameter: nn.Parameter) -> None:
    torch._foreach_mul_([parameter.grad], 0.5)


def _swap_gradient_for_an_equal_one(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clone()


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


def _scaled_by_torch(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for number in range(7):
        run.optimizer.zero_grad()
        loss = loss_of(run.model, number) * (float("inf") if number == 3 else 1)
        scaler.scale(loss).backward()
        if number % 2:
            scaler.unscale_(run.optimizer)
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.3)
        scaler.step(run.optimizer)
        scaler.update()
        run.note(torch.tensor(scaler.get_scale()))


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


SCRIPTS: dict[str, Callable[[Run], None]] = {
    "accumulation without hints": _accumulate(hints=False),
    "accumulation with hints": _accumulate(hints=True),
    "wrong hints": _wrong_hints,
    "clipping always": _clip(0.1),
    "clipping never": _clip(1e9),
    "clipping sometimes": _clip(1.2),
    "clipping by the largest": _clip(0.05, float("inf")),
    "clipping of values": _clip_values,
    "gradients changed in place": _edit(_edit_in_place),
    "gradients changed by foreach": _edit(_edit_foreach),
    "gradients changed through views": _edit(_edit_view),
    "gradients replaced": _edit(_edit_new_gradient),
    "gradients replaced by equal ones": _edit(_swap_gradient_for_an_equal_one),
    "gradients dropped": _edit(_drop_gradient),
    "gradients in one buffer": _flat_gradients,
    "weights changed before the step": _edit(_edit_weight),
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
    "freezing and unfreezing": _freeze_and_unfreeze,
    "losses scaled by hand": _scaled_by_hand,
    "losses scaled by GradScaler": _scaled_by_torch,
    "hooks of the user's own": _users_hook_after_ours,
}


#: Scripts that neither read nor change gradients, and step after every last backward.
EAGER_SCRIPTS = [
    "accumulation with hints",
    "non-reentrant checkpoints",
    "closures",
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


def _edit_behind_the_counter(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.data.mul_(0.5)


def _clip_behind_the_counter(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.data.clamp_(-0.01, 0.01)


def _edit_array(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.numpy()[...] *= 2


def _edit_weight_data(parameter: nn.Parameter) -> None:
    parameter.data.mul_(0.9)


BEHIND = {
    "p.grad.data.mul_": _edit_behind_the_counter,
    "p.grad.data.clamp_": _clip_behind_the_counter,
    "p.grad.numpy()": _edit_array,
    "p.data.mul_": _edit_weight_data,
}


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_changes_that_no_version_counter_sees_are_honoured(
    name: str, overlap: str, disk: Path
) -> None:
    compare(_edit(BEHIND[name]), OPTIMIZERS["AdamW fused"], disk, overlap)
