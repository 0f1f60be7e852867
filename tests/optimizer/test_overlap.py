"""When updates run during backward, and where weights, states and gradients are between steps."""

import copy
import gc
import weakref
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import AdamW

from offload_strategy.errors import OffloadError
from tests.optimizer.runs import OPTIMIZERS, Run, adamw, compare, loss_of, make_layers, offloading
from tests.training import assert_same_bits, in_turn, moved, on_disk, weights


def _loss(layers):
    return layers(torch.ones(2, 8)).pow(2).sum()


def test_updates_run_in_the_last_backward_and_are_committed_at_the_step(disk, aheads):
    """And written into the storages of the weights, so that their aliases see it."""
    # In host memory, so that no update ever waits for its states.
    with offloading(disk, host="1MiB") as engine:
        model = make_layers(4, 8)
        aliases = {name: p.detach() for name, p in model.named_parameters()}
        optimizer = engine.attach(None, AdamW(model.parameters()))
        for step in range(1, 4):
            optimizer.zero_grad()
            before = weights(model)
            for index in range(2):
                assert len(aheads) == 4 * (step - 1)
                engine.microbatch(index, last=index == 1)
                _loss(model).backward()
            assert len(aheads) == 4 * step
            assert_same_bits(weights(model), before)
            optimizer.step()
            assert all(not torch.equal(now, before[name]) for name, now in aliases.items())
            assert_same_bits(weights(model), aliases)
        assert not optimizer.inner.state
        assert engine.metrics()["offload/optimizer/redone_steps"] == 0


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
def test_what_is_in_host_memory_stays_there(overlap, disk):
    """Half of the states never touch the disk, in whatever order updates and commits come."""
    with offloading(disk, overlap, host="1KiB") as engine:  # two layers of four
        model = make_layers(4, 8)
        optimizer = engine.attach(None, AdamW(model.parameters()))
        (host,) = engine._resources.memory_tiers.values()
        written = []
        for _ in range(5):
            optimizer.zero_grad()
            _loss(model).backward()
            optimizer.step()
            on_disk(engine)
            written.append(moved(engine, "optimizer"))
            assert host.used_bytes == 2 * 2 * 64 * 4
        assert {later - earlier for earlier, later in pairwise(written)} == {2 * 2 * 64 * 4}


# ---------------------------------------------------------------------- eager
#: `gradients/test_life.py` has the operators, that of loss scalers among them.
def test_gradients_that_were_used_are_refused_from_the_first_step(disk):
    with offloading(disk, "eager") as engine:
        run = Run(adamw, engine)
        run.backward(0)
        assert "consumed" in repr(run.model.first.weight.grad)
        weights = [p.detach().clone() for p in run.model.parameters()]
        with pytest.raises(OffloadError, match=r"optimizer\.overlap: commit"):
            run.backward(1)
        assert all(map(torch.equal, weights, run.model.parameters()))


def test_weights_change_during_backward_and_gradients_are_freed(disk):
    with offloading(disk, "eager", host="1MiB") as engine:
        run = Run(adamw, engine)
        alive, parameter = [], run.model.tied.weight
        before = parameter.detach().clone()
        for each in run.model.parameters():
            if each.requires_grad:
                each.register_hook(lambda g: alive.append(weakref.ref(g)))
        run.backward(0)
        assert not torch.equal(parameter, before)
        # Those of subgroups of which another parameter takes no part in the loss wait for step().
        run.optimizer.step()
        gc.collect()
        assert sum(reference() is not None for reference in alive) == 0


@pytest.mark.parametrize("by", ["optimizer", "next backward", "failure"])
def test_a_backward_without_a_step_is_an_error_and_leaves_no_gradient_behind(by, disk):
    """A loss of another optimizer's, a step that is skipped, a pass that failed."""
    with offloading(disk, "eager") as engine:
        run = Run(adamw, engine)
        if by == "failure":
            handle = run.model.first.weight.register_hook(lambda g: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run.backward(0)
            handle.remove()
        else:
            run.backward(0)
        if by == "next backward":
            run.model.zero_grad()
        with pytest.raises(OffloadError, match=r"no step\(\) followed.*last checkpoint"):
            run.backward(1) if by == "next backward" else run.optimizer.zero_grad()
        # Raised once: training may go on.
        run.model.zero_grad()
        run.backward(1)
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert all(p.grad is None for p in run.model.parameters())


def _move_to_a_group(run, weight, state):
    groups = run.optimizer.param_groups
    groups[1]["params"].append(groups[0]["params"].pop())


_STATES, _GRADIENT = "states of the", "a gradient was replaced"
#: What comes between a backward and its step, and what the error says.
LATE_CHANGES = {
    "states loaded": (lambda run, weight, state: run.optimizer.load_state_dict(state), _STATES),
    "a state replaced": (lambda run, weight, state: run.optimizer.state.pop(weight), _STATES),
    "a state changed in place": (
        lambda run, weight, state: run.optimizer.state[weight]["exp_avg"].zero_(),
        _STATES,
    ),
    "a setting": (
        lambda run, weight, state: run.optimizer.param_groups[0].update(lr=0.5),
        "settings of a parameter group",
    ),
    "another group": (_move_to_a_group, "added to a group or taken from it"),
    "no gradient": (lambda run, weight, state: setattr(weight, "grad", None), _GRADIENT),
    "another gradient": (
        lambda run, weight, state: setattr(weight, "grad", torch.ones(8, 6)),
        _GRADIENT,
    ),
    "a zeroed gradient": (lambda run, weight, state: weight.grad.zero_(), _GRADIENT),
    "a second step": (lambda run, weight, state: run.optimizer.step(), "called again"),
}


@pytest.mark.parametrize("change", LATE_CHANGES)
def test_what_changes_between_an_eager_backward_and_its_step_is_refused(change, disk):
    """Plain PyTorch would use it, and weights have been updated without it."""
    late_change, message = LATE_CHANGES[change]
    with offloading(disk, "eager") as engine:
        run = Run(OPTIMIZERS["AdamW groups"], engine)
        weight = run.model.first.weight
        run.backward(0)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.optimizer.param_groups[0]["lr"] *= 0.9  # no gradient has been used
        state = copy.deepcopy(run.optimizer.state_dict())
        run.optimizer.load_state_dict(state)
        run.optimizer.state[weight]["exp_avg"].zero_()
        run.backward(1)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.backward(2)
        late_change(run, weight, state)
        with pytest.raises(OffloadError, match=rf"{message}.*last checkpoint"):
            run.optimizer.step()
        run.model.zero_grad()
        run.backward(3)
        run.optimizer.step()
        on_disk(engine)
        assert engine._resources.pool.usage().lent_bytes == 0


# ---------------------------------------------------------------------- gradients that are kept
def _halve_arrays(kept):
    for each in kept:
        np.multiply(each.numpy(), 0.5, out=each.numpy())


KEPT_EDITS = {
    "none": lambda kept: None,
    "one by one": lambda kept: [each.mul_(0.5) for each in kept],
    "listed": lambda kept: torch._foreach_mul_(kept, 0.5),
    "in place through numpy": _halve_arrays,
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("none", ""), *product([*KEPT_EDITS][1:], ["gradients", "aliases", "arrays"])],
)
def test_gradients_that_are_kept_over_steps_may_be_edited(name, kind, disk):
    """`zero_grad(set_to_none=False)` keeps their memory; without edits updates run ahead."""

    def script(run):
        kept = []
        for number in range(5):
            run.optimizer.zero_grad(set_to_none=False)
            run.backward(number)
            if name != "none":
                gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
                views = {
                    "gradients": lambda g: g,
                    "aliases": lambda g: g.data,
                    "arrays": lambda g: torch.from_numpy(g.numpy()),
                }
                kept = kept or [views[kind](each) for each in gradients]
            KEPT_EDITS[name](kept)
            run.step()

    metrics = compare(script, adamw, disk)
    if name == "none":
        assert metrics["offload/optimizer/speculated_steps"] == 5
        assert metrics["offload/optimizer/redone_steps"] == 0


# ---------------------------------------------------------------------- clipping and loss scaling
STEPS = 14


@pytest.fixture(params=["memory", "disk"])
def place(request, disk):
    """Where gradients wait for `step()`."""
    if request.param == "disk":
        request.getfixturevalue("gradients_leave")
    return disk


def _steps_ahead(make, script, *where):
    """Train with and without offload; returns the steps that ran ahead, and those in vain."""
    metrics = compare(script, make, *where)
    return [metrics[f"offload/optimizer/{verb}_steps"] for verb in ("speculated", "redone")]


def _each(do):
    return lambda m, _: [do(p.grad) for p in m.parameters() if p.grad is not None]


def _limit(limit, **options):
    return lambda m, number: clip_grad_norm_(m.parameters(), limit(number), **options)


def _changing_nothing(g):
    one = torch.tensor(1.0)
    g.mul_(1).mul_(1.0).mul_(one).div_(1.0)
    torch._foreach_mul_([g], one)
    torch._amp_foreach_non_finite_check_and_unscale_([g], torch.zeros(()), one)


#: Each does to some numbers something else than the one before it.
ALIKE = [
    lambda g: g.mul_(0.3),
    lambda g: g.mul_(torch.tensor(0.3, dtype=torch.float16)),
    lambda g: g.div_(0.3),
    lambda g: g.div_(0.3).div_(0.3),
    lambda g: g.clamp_(-1e-3, 1e-3),
    lambda g: g.clamp_(None, 1e-3),
    lambda g: g.mul_(2).clamp_(max=1e-3),
    lambda g: g.clamp_(max=1e-3).mul_(2),
]
NOW_AND_THEN = (7, 13)
UNCHANGED, FORESEEN = (STEPS, STEPS, 0), (STEPS, STEPS - 3, 1)

#: What is done to gradients, in how many steps, how many run ahead, and how many of those in vain.
CLIPS = {
    "a norm that never bites": (_limit(lambda _: 1e9), UNCHANGED),
    "a largest value that never bites": (_limit(lambda _: 1e9, norm_type=torch.inf), UNCHANGED),
    "factors of one": (_each(_changing_nothing), UNCHANGED),
    "reading": (_each(lambda g: g.sum()), UNCHANGED),
    "a limit of values": (lambda m, _: clip_grad_value_(m.parameters(), 1e-3), FORESEEN),
    "a factor": (_each(lambda g: g.mul_(0.5)), FORESEEN),
    "a divisor": (_each(lambda g: g.div_(3)), FORESEEN),
    "a norm that always bites": (_limit(lambda number: 1e-3 * (number + 1)), (STEPS, 1, 1)),
    "a norm that bites now and then": (
        _limit(lambda number: 1e-4 * number if number in NOW_AND_THEN else 1e9),
        (STEPS, STEPS, len(NOW_AND_THEN)),
    ),
    "edits that are alike": (
        lambda m, number: _each(ALIKE[number // 10])(m, number),
        (10 * len(ALIKE), 10 * len(ALIKE) - 3, 2 * len(ALIKE) - 1),
    ),
}


@pytest.mark.parametrize(
    ("name", "place"),
    in_turn([*CLIPS, "a norm that bites now and then"], ["disk", "memory"]),
    indirect=["place"],
)
def test_updates_run_ahead_where_what_happens_to_gradients_is_foreseen(name, place):
    clip, (count, *expected) = CLIPS[name]

    def train(run):
        for number in range(count):
            run.optimizer.zero_grad()
            loss = run.backward(number)
            seen = clip(run.model, number)
            run.optimizer.step()
            run.note(loss)
            if isinstance(seen, torch.Tensor):
                run.history[-1]["seen"] = seen.detach().clone()

    assert _steps_ahead(adamw, train, place) == expected


@pytest.mark.parametrize(
    ("overlap", "clip", "overflows", "place"),
    [
        ("commit", None, (0, 1, 9), "memory"),
        ("commit", 1e-3, (3,), "memory"),
        ("commit", 1e-3, (3,), "disk"),
        ("commit", 1e9, (0, 1, 9), "disk"),
        ("off", 1e-3, (3,), "memory"),
    ],
    indirect=["place"],
)
def test_loss_scaling_with_overflows(overlap, overflows, clip, place):
    def train(run):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        for number in range(STEPS):
            run.optimizer.zero_grad()
            loss = loss_of(run.model, number)
            scaler.scale(loss).backward()
            if number in overflows:
                gradient = run.model.first.weight.grad  # held on to past the step, as users may
                assert gradient is not None
                gradient[0, 0] = float("inf")
            if clip is not None:
                scaler.unscale_(run.optimizer)
                clip_grad_norm_(run.model.parameters(), clip)
            scaler.step(run.optimizer)
            scaler.update()
            run.note(loss)
            run.history[-1]["scale"] = torch.tensor(scaler.get_scale())

    # Not the fused kernel, which unscales by itself: it leaves other gradients where it skips.
    ahead, redone = _steps_ahead(OPTIMIZERS["AdamW"], train, place, overlap)
    if overlap == "off":
        assert ahead == 0
    elif clip != 1e-3:
        assert redone < ahead <= STEPS
