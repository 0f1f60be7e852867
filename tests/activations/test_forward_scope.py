"""Where offload begins and ends: calls of a model, scopes, threads, hooks around and inside."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F

from tests.activations.support import Calls, X, compare, network, noise, with_gradients
from tests.training import activations_only, assert_same_bits, bits, gradients, moved, on_disk


def test_a_scope_covers_work_outside_of_the_model(engine):
    model = nn.Linear(8, 8)
    x, target = noise(4, 8), noise(4, 8, seed=9)

    def run(scope):
        model.zero_grad()
        with scope:
            loss = F.cross_entropy(model(x).exp(), target.softmax(1))
        on_disk(engine)
        loss.backward()
        return loss

    plain = run(nullcontext())
    expected = gradients(model)
    engine.attach(model)
    run(nullcontext())
    without = moved(engine)
    assert bits(run(engine.forward())) == bits(plain)
    assert_same_bits(gradients(model), expected)
    assert moved(engine) - without > without


def test_activations_leave_in_eval_mode_if_gradients_are_recorded(engine):
    """As with frozen batch norms, and with adapters on a frozen base."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8)).eval()
    model[0].requires_grad_(False)
    compare(engine, model, lambda: model(noise(4, 8)).sum())


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "no gradients"])
def test_nothing_leaves_when_nothing_is_trained(engine, how):
    model, x = network(), noise(4, 8)
    expected = model(x)
    engine.attach(model)
    if how == "no gradients":
        model.requires_grad_(False)
    with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(how, nullcontext)():
        assert torch.equal(model(x), expected)
        with engine.forward():
            pass
    assert moved(engine) == moved(engine, verb="forwarded") == 0
    assert engine._resources.store.registry.live == 0


def test_a_call_that_never_began_ends_no_other(engine):
    """A hook before ours refuses the inner of two calls of one module; the outer goes on."""
    depth = 0

    def refuse_the_inner(module, args):
        nonlocal depth
        depth += 1
        if depth == 2:
            raise ValueError("too deep")

    def function(w):
        with pytest.raises(ValueError, match="too deep"):
            model()
        return (w * 2).exp().sum()  # saved after the inner call

    model = Calls(function)
    engine.attach(model)
    model.register_forward_pre_hook(refuse_the_inner, prepend=True)
    loss = model()
    on_disk(engine)
    assert moved(engine) == 8 * 8 * 4
    loss.backward()


def test_two_threads_may_run_the_same_model(engine):
    """One trains in the middle of its forward while the other evaluates, begins and ends."""
    inside, resume = threading.Event(), threading.Event()
    other = threading.current_thread()

    def function(w):
        y = (X @ w).exp()
        if threading.current_thread() is not other:
            inside.set()
            resume.wait(30)
        return y.sin().sum()

    model, expected = with_gradients(function, engine)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(model)
        assert inside.wait(30)
        with torch.no_grad():
            model()
        losses = [model()]
        resume.set()
        losses.append(training.result(30))
    on_disk(engine)
    for loss in losses:
        model.zero_grad()
        loss.backward()
        assert_same_bits(gradients(model), expected)
    assert moved(engine) > 0


# ---------------------------------------------------------------------- hooks around ours
#: What hooks of a user's own make of a saved tensor, and the tensor of that again.
HOOKS = {
    "count": (lambda tensor: tensor, lambda packed: packed),
    "compress": (lambda tensor: tensor.bfloat16(), lambda packed: packed.float()),
    "compress into a tuple": (
        lambda tensor: (tensor.dtype, tensor.to(torch.float64)),
        lambda packed: packed[1].to(packed[0]),
    ),
}
#: What torch has of such hooks.
CONTEXTS = {
    "save on the host": save_on_cpu,
    "allow mutation": torch.autograd.graph.allow_mutation_on_saved_tensors,
}


def run_under(kind, model, between=lambda: None):
    """Gradients of a step in hooks of a kind, and which calls of these there were."""
    called = []

    def pack(tensor):
        called.append(f"pack {tuple(tensor.shape)}")
        return HOOKS[kind][0](tensor)

    def unpack(packed):
        called.append("unpack")
        return HOOKS[kind][1](packed)

    model.zero_grad()
    torch.manual_seed(3)
    with CONTEXTS[kind]() if kind in CONTEXTS else saved_tensors_hooks(pack, unpack):
        loss = model(noise(6, 8)).pow(2).sum()
        between()
        loss.backward()
    return gradients(model), called


@pytest.mark.parametrize("kind", [*HOOKS, *CONTEXTS])
def test_hooks_around_a_model_do_what_they_do_without_offload(engine, kind):
    """Numbers too: where they change what is saved, they change it just the same."""
    model = network().append(nn.Dropout(0.2))
    expected, called = run_under(kind, model)
    engine.attach(model)
    for between in (lambda: None, lambda: on_disk(engine)):
        got, called_now = run_under(kind, model, between)
        assert_same_bits(got, expected)
        assert called_now == called
    # What they make of a tensor leaves if it is one.
    assert (moved(engine) > 0) == (kind in ("count", "compress"))


def test_hooks_around_two_engines_are_heard_by_both(disk):
    """The innermost engine has what is saved inside; neither hides the hooks around them."""
    inner = network()
    model = nn.Sequential(network(), nn.Tanh(), inner)
    expected, called = run_under("compress", model)
    with activations_only(disk) as one, activations_only(disk) as two:
        one.attach(model)
        two.attach(inner)
        got, called_now = run_under("compress", model, lambda: (on_disk(one), on_disk(two)))
        assert min(moved(one), moved(two)) > 0
    assert_same_bits(got, expected)
    assert called_now == called


def test_hooks_inside_a_model_are_called_in_place_of_ours(engine):
    packed = []

    def pack(tensor):
        packed.append(tensor.numel())
        return tensor

    def function(w):
        y = (X @ w).exp()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            y = y.sin()
        with save_on_cpu():
            y = y * y
        return y.exp().sum()

    compare(engine, Calls(function))
    assert packed == [64] * 3
