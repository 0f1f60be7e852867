"""Parameters, states and losses are the plain optimizer's to the last bit, at every step."""

import copy
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint

from tests.optimizer.custom_optimizers import twisted
from tests.optimizer.gradients.acts import halved
from tests.optimizer.runs import (
    EVERY_OVERLAP,
    OPTIMIZERS,
    OVERLAPS,
    Run,
    WideNet,
    adamw,
    compare,
    loss_of,
    make_layers,
    offloading,
    steps,
)
from tests.training import in_turn


def _late_gradients(run):
    """Six steps; one parameter gets its first gradient in the fourth."""
    for number in range(6):
        run.optimizer.zero_grad(set_to_none=number % 2 == 0)
        run.backward(number, extra=number >= 3)
        run.step()


@pytest.mark.parametrize(
    ("name", "host", "overlap"),
    [
        *((name, None, overlap) for name, overlap in in_turn(OPTIMIZERS, EVERY_OVERLAP)),
        *(("AdamW fused", *pair) for pair in product(("1KiB", "1MiB"), EVERY_OVERLAP)),
        ("SGD momentum", "1KiB", "commit"),
        ("that changes gradients", None, "commit"),
    ],
)
def test_six_steps_of(name, host, overlap, disk):
    metrics = compare(_late_gradients, OPTIMIZERS[name], disk, overlap, host)
    assert (metrics["offload/tier/nvme/used_bytes"] > 0) == (name != "SGD" and host != "1MiB")
    if host is not None:
        assert metrics["offload/tier/host/used_bytes"] > 0


# ---------------------------------------------------------------------- other kinds of parameters
def _two_at_once(dtype):
    """Two optimizers that share a chain of layers in one dtype."""

    def script(run):
        run.model = make_layers(4, 6).to(dtype)
        weights = list(run.model.parameters())
        inner = AdamW(weights[:2], 1e-2), SGD(weights[2:], 1e-2, momentum=0.9)
        optimizers = [run.wrap(optimizer) for optimizer in inner]
        for number in range(4):
            run.model.zero_grad()
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(number)).to(dtype)
            for layer in run.model:
                x = torch.tanh(layer(x))
            x.abs().float().sum().backward()
            run.note(None, *optimizers)
            for optimizer in optimizers:
                optimizer.step()
            run.note(None, *optimizers)

    return script


def _descend(run, model, loss):
    run.model, run.optimizer = model, run.wrap(SGD(model.parameters(), 0.1))
    for number in range(4):
        run.optimizer.zero_grad()
        loss(number).backward()
        run.step()


def _sparse_gradients(run):
    model = _sparse_model()
    _descend(run, model, lambda number: model(torch.tensor([number, 3, 3])).pow(2).sum())


def _gradients_in_float32(run):
    """Of weights in bfloat16, as `grad_dtype` allows."""
    model = make_layers(3, 64).bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32

    def loss(number):
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(number))
        return model(x.bfloat16()).float().pow(2).sum()

    _descend(run, model, loss)


def _two_that_alternate(run):
    """A generator and a discriminator; backward of one reaches the parameters of the other."""
    torch.manual_seed(0)
    makes = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16))
    judges = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    run.model = nn.ModuleList([makes, judges])
    first = run.wrap(Adam(makes.parameters(), 1e-3), makes)
    second = run.wrap(AdamW(judges.parameters(), 1e-3, fused=True), judges)
    for step in range(8):
        noise = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
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


def _sparse_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_update_that_the_optimizer_refuses_is_refused_at_step(overlap, disk):
    def script(run):
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
def _accumulate(hint):
    """Accumulate over micro-batches; `hint` gets the number of each, and whether it is the last."""

    def script(run):
        number = 0
        for micro_batches in (3, 3, 1, 3):
            run.optimizer.zero_grad()
            for index in range(micro_batches):
                hint(run, index, index == micro_batches - 1)
                (loss_of(run.model, number) / micro_batches).backward()
                number += 1
                if not run.eager:
                    run.note()
            run.step()

    return script


def _edit(edit, when=range(6)):
    """What `edit` does to the model between backward and `step()` of some of six steps."""

    def script(run):
        steps(run, 6, 0, lambda number: edit(run.model) if number in when else None, extra=True)

    return script


def _edit_twice(edit):
    """What `edit` does to a weight of its own and to a tied one, in the second and last step."""
    return _edit(lambda model: (edit(model.first.weight), edit(model.embedding.weight)), (1, 5))


#: The last three of them increment no version counter.
EDITS = {
    "gradients changed by operators that do not declare it": lambda p: halved(p.grad),
    "gradients changed through views": lambda p: p.grad[0].zero_(),
    "gradients replaced": lambda p: setattr(p, "grad", p.grad * 2),
    "gradients replaced, transposed": lambda p: setattr(p, "grad", p.grad.t().contiguous().t()),
    "gradients replaced by equal ones": lambda p: setattr(p, "grad", p.grad.clone()),
    "gradients copied with the model": lambda p: copy.deepcopy(p),
    "gradients dropped": lambda p: setattr(p, "grad", None),
    "p.grad.data.mul_": lambda p: p.grad.data.mul_(0.5),
    "p.grad.numpy()": lambda p: np.multiply(p.grad.numpy(), 2, out=p.grad.numpy()),
    "p.data.mul_": lambda p: p.data.mul_(0.9),
}


#: What happens inside a setting of a group between backward and `step()`.
SETTING_EDITS = {
    "a nested list": lambda group: group["nested"]["rates"].append(
        group["nested"]["rates"][-1] / 2
    ),
    "an array": lambda group: np.multiply(group["array"], 0.5, out=group["array"]),
}


@pytest.mark.parametrize("name", SETTING_EDITS)
def test_settings_inside_of_others_are_those_of_the_step(name, disk):
    def make(model):
        settings = {"nested": {"rates": [0.5]}, "array": np.full(2, 0.25)}
        rate = lambda o, g, p, s: p.grad * (g["nested"]["rates"][-1] + float(g["array"][1]))  # noqa: E731
        return twisted(rate)([{"params": list(model.parameters()), **settings}])

    def script(run):
        steps(run, 4, 0, lambda number: SETTING_EDITS[name](run.optimizer.param_groups[0]))

    compare(script, make, disk)


@pytest.mark.parametrize(
    ("steps_inside", "overlap"), [*product((False, True), OVERLAPS), (False, "eager")]
)
def test_updates_run_under_the_autocast_of_their_step(steps_inside, overlap, disk):
    """And not under that of backward, from which they run ahead."""

    def script(run):
        for number in range(5):
            run.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                run.backward(number)
            with torch.autocast("cpu", torch.bfloat16, enabled=steps_inside and number > 1):
                run.step()

    metrics = compare(script, OPTIMIZERS["Adafactor"], disk, overlap)
    redone = metrics["offload/optimizer/redone_steps"]
    assert redone == (steps_inside and overlap == "commit")


def _some_inputs_only(run):
    for number in range(4):
        run.optimizer.zero_grad()
        loss_of(run.model, number).backward(inputs=[run.model.first.weight, run.model.scale])
        run.step()
        run.backward(number)
        run.step()


def _checkpointed(reentrant, outside=False):
    def script(run):
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


def _closure(run):
    for number in range(5):

        def closure(number=number):
            run.optimizer.zero_grad()
            loss = loss_of(run.model, number)
            loss.backward()
            return loss

        run.note(run.optimizer.step(closure))
        run.note()


def _freeze_and_unfreeze(run):
    model = run.model
    changes = {2: (model.frozen, True), 4: (model.first, False), 6: (model.first, True)}
    for number in range(8):
        run.optimizer.zero_grad()
        if number in changes:
            module, trains = changes[number]
            module.requires_grad_(trains)
        run.backward(number)
        model.norm.requires_grad_(number != 3)  # it has a gradient, so it is updated
        run.step()


def _users_hook_after_ours(run):
    def halve(parameter):
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    run.model.first.weight.register_post_accumulate_grad_hook(halve)
    run.model.tied.weight.register_hook(lambda grad: grad * 2)
    _late_gradients(run)


def _flat_gradients(run):
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


def _graph_over_gradients(run):
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


def _loss_of_gradients(run):
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
SCRIPTS = {
    **{name: _edit_twice(edit) for name, edit in EDITS.items()},
    "one gradient set by hand": _edit(
        lambda model: setattr(model.unused.weight, "grad", torch.full((3, 3), 0.5))
    ),
    "models that are converted": _edit(lambda model: model.double().float()),
    "accumulation without hints": _accumulate(lambda run, index, last: None),
    "accumulation with hints": _accumulate(Run.hint),
    "wrong hints": _accumulate(lambda run, index, last: run.hint(index, not last)),
    "gradients in one buffer": _flat_gradients,
    "gradients of some parameters": _some_inputs_only,
    "reentrant checkpoints": _checkpointed(True),
    "reentrant checkpoints of parameters that are used outside as well": _checkpointed(True, True),
    "non-reentrant checkpoints": _checkpointed(False),
    "closures": _closure,
    "freezing and unfreezing": _freeze_and_unfreeze,
    "hooks of the user's own": _users_hook_after_ours,
    "graphs over gradients": _graph_over_gradients,
    "losses of gradients": _loss_of_gradients,
    "sparse gradients": _sparse_gradients,
    "gradients of another dtype": _gradients_in_float32,
    "two optimizers that alternate": _two_that_alternate,
    **{f"parameters of {dtype}": _two_at_once(dtype) for dtype in DTYPES},
}


#: Scripts that neither read nor change gradients, and step after every last backward.
EAGER_SCRIPTS = [
    "accumulation with hints",
    "non-reentrant checkpoints",
    "closures",
    "one gradient set by hand",
    "freezing and unfreezing",
    "gradients of another dtype",
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
def test_the_same_numbers_with(name, overlap, disk, request):
    if overlap == "commit, on the disk":
        request.getfixturevalue("gradients_leave")
        overlap = "commit"
    compare(SCRIPTS[name], adamw, disk, overlap)


# ---------------------------------------------------------------------- slices of parameters
def _whole_norm(o, g, p, s):
    """Scales by the norm of the whole tensor, as LARS and LAMB do."""
    return p.grad - p.grad / p.grad.norm()


def _odd_blocks(o, g, p, s):
    """Leaves rows out whose place in the tensor matters."""
    left_out = p.grad.clone()
    left_out[:: 1 + len(p) % 7] = 0
    return left_out


def _projects_matrices(o, g, p, s):
    """Updates everything but matrices by element, as GaLore does."""
    return p.grad.mean(0) if p.dim() == 2 else None


ELEMENTWISE = [
    *("AdamW fused", "AdamW foreach", "AdamW per tensor", "NAdam", "Adamax foreach groups"),
    *("Adagrad", "Rprop", "SGD momentum", "RMSprop centered foreach", "ASGD"),
]
WHOLE = {
    "Adafactor": OPTIMIZERS["Adafactor"],
    **{
        twist.__name__: lambda model, twist=twist: twisted(twist)(list(model.parameters()))
        for twist in (_whole_norm, _odd_blocks, _projects_matrices)
    },
}


@pytest.mark.parametrize(("name", "overlap"), in_turn([*ELEMENTWISE, *WHOLE], EVERY_OVERLAP))
def test_parameters_are_sliced_where_that_gives_the_same_bits(name, overlap, disk):
    def script(run):
        steps(run, 5)
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        steps(run, 1)
        if run.engine is not None:
            (optimizer,) = run.engine._optimizers
            sliced = sum(p.rows is not None for s in optimizer._subgroups for p in s.slices)
            assert sliced > 20 if name in ELEMENTWISE else sliced == 0

    #: Rows of them are no multiple of anything.
    options = {"make_model": partial(WideNet, 37, 1000, 331), "subgroup_size": 3000}
    compare(script, {**OPTIMIZERS, **WHOLE}[name], disk, overlap, **options)
