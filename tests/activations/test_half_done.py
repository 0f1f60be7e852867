"""However a step is left half done, nothing remains, and the next is as in a fresh process."""

import gc
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from offload_strategy.activations.forward_records import Trace
from tests.activations.support import noise
from tests.training import activations_only, assert_same_bits, gradients, weights

#: As long as background work may take to notice.
_PATIENCE_SECONDS = 20.0


# ---------------------------------------------------------------------- a training that can fail
#: What is raised at a place, once.
_armed = {}


class Failure(Exception):
    """An error of the user's own."""


def pass_by(place, tensor=None):
    """Training is here, and goes on with a tensor unless something was armed."""
    recomputes = place.endswith("region") and torch._C._current_graph_task_id() != -1
    kind = _armed.pop(f"{place}, again" if recomputes else place, None)
    if kind is KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(_PATIENCE_SECONDS)  # until the handler raises
    elif kind is not None:
        raise kind("half done")
    return tensor


class _Sine(torch.autograd.Function):
    """An operation that notices its backward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (slope,) = ctx.saved_tensors
        pass_by("backward")
        return grad * slope


class Model(nn.Module):
    """Small, with something of everything that can fail."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.region, self.reentrant = (
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2)
        )
        for place, register in {
            "first module": self.first.register_forward_hook,
            "last module": self.last.register_forward_hook,
            "region": self.region[0].register_forward_hook,
            "reentrant region": self.reentrant[0].register_forward_hook,
            "forward pre-hook": self.middle.register_forward_pre_hook,
            "forward hook": self.middle.register_forward_hook,
            "full backward pre-hook": self.middle.register_full_backward_pre_hook,
            "full backward hook": self.middle.register_full_backward_hook,
            "post-accumulate hook": self.middle.weight.register_post_accumulate_grad_hook,
        }.items():
            register(lambda *_, place=place: pass_by(place))

    def forward(self, x):
        x = _Sine.apply(self.first(x))
        x.register_hook(lambda _: pass_by("tensor hook"))
        x = checkpoint(self.region, x, use_reentrant=False)
        x = checkpoint(self.reentrant, x, use_reentrant=True)
        pass_by("middle of the model")
        with saved_tensors_hooks(
            # Detached, or what saves its own result owns itself, for ever.
            lambda tensor: pass_by("pack of nested hooks", tensor.detach()),
            lambda tensor: pass_by("unpack of nested hooks", tensor),
        ):
            x = self.middle(x).exp()
        x = x * torch.func.grad(lambda v: pass_by("transform", v).sin().sum())(x.detach())
        with torch.no_grad():
            pass_by("no_grad")
        with torch.autocast("cpu", torch.bfloat16):
            x = self.last(x)
            pass_by("autocast")
        return x.float()


class Training:
    """Two micro-batches a step, an optimizer with momentum; without an engine plain PyTorch."""

    def __init__(self, engine=None):
        self.model = Model()
        self.engine = engine
        if engine is not None:
            engine.attach(self.model)
        # After ours: an error in the first is one that our pre-hook does not hear of.
        self.model.register_forward_pre_hook(lambda *_: pass_by("before everything"), prepend=True)
        self.model.register_forward_pre_hook(lambda *_: pass_by("pre-hook of the model"))
        self.model.register_forward_hook(lambda *_: pass_by("hook of the model"))
        self.optimizer = SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.optimizer.register_step_pre_hook(lambda *_: pass_by("step pre-hook"))

    def loss(self, seed, scale=1.0):
        """Of one micro-batch."""
        batch = scale * noise(4, 8, seed=seed)
        y = self.model(batch)
        pass_by("loss")
        return (y - batch).pow(2).mean()

    def step(self, seed):
        """A whole step; loss, gradients and weights."""
        torch.manual_seed(seed)
        self.optimizer.zero_grad()
        losses = []
        for index in range(2):
            if self.engine is not None:
                self.engine.microbatch(index, last=index == 1)
            loss = self.loss(2 * seed + index)
            pass_by(f"between, {index}")
            loss.backward()
            losses.append(loss.detach())
        numbers = {"loss": torch.stack(losses), **gradients(self.model)}
        self.optimizer.step()
        return numbers | weights(self.model)


# ---------------------------------------------------------------------- how it fails
def _fails(place, kind, training):
    _armed[place] = kind
    with pytest.raises(kind):
        training.step(99)


def _fails_in_a_scope(kind, training):
    _armed["loss"] = kind
    with pytest.raises(kind), training.engine.forward():
        training.loss(99)


def _fails_in_hooks_around(training):
    place = "pack of hooks around"
    with saved_tensors_hooks(lambda tensor: pass_by(place, tensor), lambda tensor: tensor):
        _fails(place, Failure, training)


def _fails_in_flight(place, order, training):
    """Several forwards are under way when one forward or backward fails."""

    def schedule():
        losses = []
        for index in range(3):
            if index == 2 and place != "backward":
                _armed[place] = Failure
            losses.append(training.loss(99, index))
        losses[order[0]].backward()
        _armed[place] = Failure
        for index in order[1:]:
            losses[index].backward()

    with pytest.raises(Failure):
        schedule()


def _thread_dies(place, training):
    def run():
        with suppress(Failure):
            training.step(99)

    _armed[place] = Failure
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(_PATIENCE_SECONDS)
    assert not thread.is_alive()


def _exception_that_holds_the_graph(training):
    """Kept for a while, as a notebook keeps the last one; the graph lives as long."""
    _armed["between, 1"] = Failure
    try:
        training.step(99)
    except Failure as error:
        kept = error
    assert training.engine._resources.store.registry.live > 0
    del kept


def _interrupted_before_backward_has_used_anything(training):
    """Nothing is known of such a pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trace, "used", lambda *_: pass_by("use"))
        _fails("use", KeyboardInterrupt, training)


#: What is raised, and where.
FAULTS = {
    Failure: (
        "first module", "middle of the model", "last module", "forward pre-hook", "forward hook",
        "before everything", "pre-hook of the model", "hook of the model", "region",
        "reentrant region", "region, again", "reentrant region, again", "pack of nested hooks",
        "unpack of nested hooks", "transform", "no_grad", "autocast", "loss", "between, 0",
        "between, 1", "backward", "tensor hook", "post-accumulate hook", "full backward pre-hook",
        "full backward hook", "step pre-hook",
    ),
    SystemExit: ("middle of the model", "backward", "transform"),
    GeneratorExit: ("middle of the model", "backward", "transform"),
    KeyboardInterrupt: (
        "first module", "pack of nested hooks", "region", "transform", "loss", "between, 1",
        "backward", "region, again", "reentrant region, again", "post-accumulate hook",
        "step pre-hook",
    ),
}  # fmt: skip

WAYS = {
    **{
        f"{kind.__name__}: {place}": partial(_fails, place, kind)
        for kind, places in FAULTS.items()
        for place in places
    },
    "forward of the third in flight": partial(_fails_in_flight, "middle of the model", [0, 1, 2]),
    "backward of the second in flight": partial(_fails_in_flight, "backward", [0, 1, 2]),
    "recompute in flight": partial(_fails_in_flight, "region, again", [1, 2, 0]),
    "thread dies in forward": partial(_thread_dies, "middle of the model"),
    "thread dies in backward": partial(_thread_dies, "backward"),
    "error in a scope": partial(_fails_in_a_scope, Failure),
    "KeyboardInterrupt in a scope": partial(_fails_in_a_scope, KeyboardInterrupt),
    "error in hooks around": _fails_in_hooks_around,
    "exception is kept": _exception_that_holds_the_graph,
    "before backward has used anything": _interrupted_before_backward_has_used_anything,
}


def assert_nothing_is_left(engine):
    """No ticket, no lent buffer, no byte of a tier, once graph and traceback are gone."""
    sys.last_value = sys.last_traceback = None
    gc.collect()
    # A backward that failed leaves nodes in autograd's queue of this thread, and with them what
    # they saved, until the next backward.
    torch.zeros(1, requires_grad=True).sum().backward()
    resources = engine._resources
    assert resources.store.registry.live == 0

    def held():
        return resources.pool.usage().lent_bytes, sum(resources.tier_used_bytes().values())

    deadline = time.monotonic() + _PATIENCE_SECONDS
    while held() != (0, 0) and time.monotonic() < deadline:
        time.sleep(0.001)  # a write that was under way ends first
    assert held() == (0, 0)


@pytest.fixture(scope="module")
def expected():
    """The second step of plain PyTorch in which nothing failed."""
    training = Training()
    training.step(0)
    return training.step(1)


@pytest.mark.parametrize("way", WAYS)
def test_after(way, engine, expected):
    training = Training(engine)
    training.step(0)
    WAYS[way](training)
    assert not _armed, "it never came by"
    assert_nothing_is_left(engine)
    assert_same_bits(training.step(1), expected)
    assert_nothing_is_left(engine)


def test_one_after_the_other(disk, expected):
    """All of them in one process on one engine, with a host tier that is too small."""
    with activations_only(disk, host="2KiB") as engine:
        training = Training(engine)
        training.step(0)
        for way in WAYS.values():
            way(training)
            _armed.clear()
        assert_nothing_is_left(engine)
        assert_same_bits(training.step(1), expected)
        assert_nothing_is_left(engine)
