"""However a step is left half done, nothing remains, and the next is as in a fresh process."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from offload_strategy import OffloadEngine
from offload_strategy.activations.forward_records import Trace
from tests.activations.support import noise
from tests.training import Numbers, activations_only, assert_same_bits, gradients, weights

#: As long as background work may take to notice.
_PATIENCE_SECONDS = 20.0


# ---------------------------------------------------------------------- a training that can fail
#: What happens at a place, once.
_armed: dict[str, Callable[[], Any]] = {}


def arm(place: str, fault: Callable[[], Any]) -> None:
    """Let something happen the next time that training comes by a place."""
    _armed[place] = fault


def disarm() -> list[str]:
    """Forget what did not happen, and say at which places."""
    places = list(_armed)
    _armed.clear()
    return places


def pass_by(place: str) -> None:
    """Training is here."""
    fault = _armed.pop(place, None)
    if fault is not None:
        fault()


class _Marked(torch.autograd.Function):
    """An operation that notices its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        pass_by("backward")
        return grad * x.cos() + 0 * y


class _Region(nn.Module):
    """A checkpointed part of the model."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        again = torch._C._current_graph_task_id() != -1
        pass_by(f"{self.name}, again" if again else self.name)
        return self.layers[1:](x)


class Model(nn.Module):
    """Small, with something of everything that can fail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.region, self.reentrant = _Region("region"), _Region("reentrant region")
        self.first.register_forward_hook(lambda *_: pass_by("first module"))
        self.last.register_forward_hook(lambda *_: pass_by("last module"))
        self.middle.register_forward_pre_hook(lambda *_: pass_by("forward pre-hook"))
        self.middle.register_forward_hook(lambda *_: pass_by("forward hook"))
        self.middle.register_full_backward_pre_hook(lambda *_: pass_by("full backward pre-hook"))
        self.middle.register_full_backward_hook(lambda *_: pass_by("full backward hook"))
        self.middle.weight.register_post_accumulate_grad_hook(
            lambda _: pass_by("post-accumulate hook")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _Marked.apply(self.first(x))
        x.register_hook(lambda _: pass_by("tensor hook"))
        x = checkpoint(self.region, x, use_reentrant=False)
        x = checkpoint(self.reentrant, x, use_reentrant=True)
        pass_by("middle of the model")
        with saved_tensors_hooks(self._pack, self._unpack):
            x = self.middle(x).exp()
        x = x * torch.func.grad(self._inside_a_transform)(x.detach())
        with torch.no_grad():
            pass_by("no_grad")
        with torch.autocast("cpu", torch.bfloat16):
            x = self.last(x)
            pass_by("autocast")
        return x.float()

    @staticmethod
    def _pack(tensor: torch.Tensor) -> torch.Tensor:
        pass_by("pack of nested hooks")
        return tensor.detach()  # or what saves its own result owns itself, for ever

    @staticmethod
    def _unpack(tensor: torch.Tensor) -> torch.Tensor:
        pass_by("unpack of nested hooks")
        return tensor

    @staticmethod
    def _inside_a_transform(x: torch.Tensor) -> torch.Tensor:
        pass_by("transform")
        return x.sin().sum()


class Training:
    """Two micro-batches a step, an optimizer with momentum.

    Args:
        engine: offloads activations; None for plain PyTorch.
    """

    def __init__(self, engine: OffloadEngine | None = None) -> None:
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

    def batches(self, seed: int) -> Iterator[torch.Tensor]:
        """Two batches of four rows."""
        return (noise(4, 8, seed=2 * seed + index) for index in range(2))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Of one micro-batch."""
        y = self.model(batch)
        error = (y - batch).pow(2)
        pass_by("loss")
        return error.mean()

    def step(self, seed: int) -> Numbers:
        """A whole step; loss, gradients and weights."""
        torch.manual_seed(seed)
        self.optimizer.zero_grad()
        losses = []
        for index, batch in enumerate(self.batches(seed)):
            if self.engine is not None:
                self.engine.microbatch(index, last=index == 1)
            loss = self.loss(batch)
            pass_by(f"between, {index}")
            loss.backward()
            losses.append(loss.detach())
        numbers = gradients(self.model)
        self.optimizer.step()
        return {"loss": torch.stack(losses), **numbers, **weights(self.model)}


# ---------------------------------------------------------------------- how it fails
@pytest.fixture(scope="module")
def expected() -> Numbers:
    """Loss, gradients and weights of the second step of plain PyTorch in which nothing failed."""
    training = Training()
    training.step(0)
    return training.step(1)


class Failure(Exception):
    """An error of the user's own."""


def _raise(kind: type[BaseException]) -> Callable[[], None]:
    def fault() -> None:
        raise kind("half done")

    return fault


def _press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_PATIENCE_SECONDS)  # until the handler raises


#: Where it fails, and how. The rest of the name is what the step was doing.
FAULTS: dict[str, tuple[type[BaseException], str, Callable[[], Any]]] = {
    **{
        f"error: {place}": (Failure, place, _raise(Failure))
        for place in (
            "first module", "middle of the model", "last module", "forward pre-hook",
            "forward hook", "before everything", "pre-hook of the model", "hook of the model",
            "region", "reentrant region", "region, again", "reentrant region, again",
            "pack of nested hooks", "unpack of nested hooks", "transform", "no_grad", "autocast",
            "loss", "between, 0", "between, 1", "backward", "tensor hook", "post-accumulate hook",
            "full backward pre-hook", "full backward hook", "step pre-hook",
        )
    },
    **{
        f"{kind.__name__}: {place}": (kind, place, _raise(kind))
        for kind in (SystemExit, GeneratorExit)
        for place in ("middle of the model", "backward", "transform")
    },
    **{
        f"Ctrl-C: {place}": (KeyboardInterrupt, place, _press_ctrl_c)
        for place in (
            "first module", "pack of nested hooks", "region", "transform", "loss", "between, 1",
            "backward", "region, again", "reentrant region, again", "post-accumulate hook",
            "step pre-hook",
        )
    },
}  # fmt: skip


def fail_at(place: str, fault: Callable[[], Any], kind: type[BaseException]) -> Any:
    """A way to leave a step: something happens at a place that it comes by."""

    def way(training: Training) -> None:
        arm(place, fault)
        with pytest.raises(kind):
            training.step(99)

    return way


def _fail_in_a_scope(training: Training, kind: type[BaseException]) -> None:
    assert training.engine is not None
    arm("loss", _raise(kind))
    with pytest.raises(kind), training.engine.forward():
        training.loss(next(training.batches(99)))


# ---------------------------------------------------------------------- ways of their own
def _fails_in_flight(place: str, order: list[int]) -> Callable[[Training], None]:
    """Several forwards are under way when one forward or backward fails."""

    def way(training: Training) -> None:
        def schedule() -> None:
            batch = next(training.batches(99))
            losses = []
            for index in range(3):
                if index == 2 and place != "backward":
                    arm(place, _raise(Failure))
                losses.append(training.loss(batch * index))
            for number, index in enumerate(order):
                if number == 1:
                    arm(place, _raise(Failure))
                losses[index].backward()

        with pytest.raises(Failure):
            schedule()

    return way


def _thread_dies(place: str) -> Callable[[Training], None]:
    def way(training: Training) -> None:
        arm(place, _raise(Failure))

        def run() -> None:
            with suppress(Failure):
                training.step(99)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(_PATIENCE_SECONDS)
        assert not thread.is_alive()

    return way


def _exception_that_holds_the_graph(training: Training) -> None:
    """Kept for a while, as a notebook keeps the last one; the graph lives as long."""
    arm("between, 1", _raise(Failure))
    try:
        training.step(99)
    except Failure as error:
        kept = error
    assert training.engine is not None
    assert training.engine._resources.store.live_tickets > 0
    del kept


WAYS: dict[str, Callable[[Training], None]] = {
    **{name: fail_at(place, fault, kind) for name, (kind, place, fault) in FAULTS.items()},
    "forward of the third in flight": _fails_in_flight("middle of the model", [0, 1, 2]),
    "backward of the second in flight": _fails_in_flight("backward", [0, 1, 2]),
    "recompute in flight": _fails_in_flight("region, again", [1, 2, 0]),
    "thread dies in forward": _thread_dies("middle of the model"),
    "thread dies in backward": _thread_dies("backward"),
    "error in a scope": lambda training: _fail_in_a_scope(training, Failure),
    "KeyboardInterrupt in a scope": lambda training: _fail_in_a_scope(training, KeyboardInterrupt),
    "exception is kept": _exception_that_holds_the_graph,
}


def assert_nothing_is_left(engine: OffloadEngine) -> None:
    """No ticket, no lent buffer, no byte of a tier, once graph and traceback are gone."""
    sys.last_value = sys.last_traceback = None
    gc.collect()
    # A backward that failed leaves nodes in autograd's queue of this thread, and with them what
    # they saved, until the next backward.
    torch.zeros(1, requires_grad=True).sum().backward()
    resources = engine._resources
    assert resources.store.live_tickets == 0

    def held() -> tuple[int, int]:
        return resources.pool.usage().lent_bytes, sum(resources.tier_used_bytes().values())

    deadline = time.monotonic() + _PATIENCE_SECONDS
    while held() != (0, 0) and time.monotonic() < deadline:
        time.sleep(0.001)  # a write that was under way ends first
    assert held() == (0, 0)


@pytest.mark.parametrize("way", WAYS)
def test_after(way: str, engine: OffloadEngine, expected: Numbers) -> None:
    training = Training(engine)
    training.step(0)
    WAYS[way](training)
    assert disarm() == [], "it never came by"
    assert_nothing_is_left(engine)
    assert_same_bits(training.step(1), expected)
    assert_nothing_is_left(engine)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_one_after_the_other(disk: Path, expected: Numbers) -> None:
    """All of them in one process on one engine, with a host tier that is too small."""
    with activations_only(disk, host="2KiB") as engine:
        training = Training(engine)
        training.step(0)
        for way in WAYS.values():
            way(training)
            disarm()
        assert_nothing_is_left(engine)
        assert_same_bits(training.step(1), expected)
        assert_nothing_is_left(engine)


def test_interrupted_before_backward_has_used_anything(
    engine: OffloadEngine, expected: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of such a pass, and the next one begins as if it had not been."""
    training = Training(engine)
    training.step(0)
    with monkeypatch.context() as patch:
        patch.setattr(Trace, "used", lambda *_: _raise(KeyboardInterrupt)())
        with pytest.raises(KeyboardInterrupt):
            training.step(99)
    assert_nothing_is_left(engine)
    assert_same_bits(training.step(1), expected)
    assert_nothing_is_left(engine)
