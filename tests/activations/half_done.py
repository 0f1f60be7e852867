"""A training that can be made to fail at any place, for test_half_done.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from offload_strategy import OffloadEngine
from tests.activations.support import noise
from tests.training import Numbers, gradients, weights

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
