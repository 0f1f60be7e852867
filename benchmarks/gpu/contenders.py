"""Who trains on a GPU: plain PyTorch, what others offer for too little memory, and this package."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu import peers
from benchmarks.gpu.job import Job
from benchmarks.optimizer.contenders import ADAMW
from offload_strategy import OffloadEngine

PLAIN, RECOMPUTE = "plain", "plain, blocks computed again"
SAVE_ON_CPU, TRL = "torch's save_on_cpu, pinned", "TRL's OffloadActivations"
TORCHAO, FSDP2 = "torchao's CPUOffloadOptimizer", "FSDP2, CPUOffloadPolicy"
ZERO_OFFLOAD = "DeepSpeed ZeRO-Offload"
ZERO_INFINITY = "DeepSpeed ZeRO-Infinity"
SUPER_OFFLOAD = "DeepSpeed SuperOffload"

_DISK, _HOST = ("disk",), ("host",)


@dataclass(frozen=True)
class Ours:
    """This package in one setting.

    Args:
        tiers: "host", "disk" or both.
        activations: whether they leave.
        overlap: of the optimizer; empty where its states stay.
        weights: whether they are streamed.
    """

    tiers: tuple[str, ...]
    activations: bool = False
    overlap: str = ""
    weights: bool = False

    def config(self, job: Job, directory: Path) -> dict[str, Any]:
        """Of the engine."""
        tiers: list[dict[str, Any]] = []
        if "host" in self.tiers:
            tiers.append({"name": "host", "kind": "dram", "capacity": job.host})
        if "disk" in self.tiers:
            tiers.append({"name": "disk", "kind": "ssd", "path": str(directory)})
        return {
            "tiers": tiers,
            "activations": {"enabled": self.activations},
            "optimizer": (
                {"overlap": self.overlap} if job.updates and self.overlap else {"enabled": False}
            ),
            "parameters": {"enabled": self.weights},
            "memory": {"pinned": job.pinned},
        }


OURS = {
    "ours: activations to the host": Ours(_HOST, activations=True),
    "ours: activations to disk": Ours(_DISK, activations=True),
    "ours: states to the host, commit": Ours(_HOST, overlap="commit"),
    "ours: states to the host, eager": Ours(_HOST, overlap="eager"),
    "ours: states to disk, commit": Ours(_DISK, overlap="commit"),
    "ours: states to disk, eager": Ours(_DISK, overlap="eager"),
    "ours: states and activations": Ours(("host", "disk"), activations=True, overlap="commit"),
    "ours: everything": Ours(("host", "disk"), activations=True, overlap="eager", weights=True),
}


class Trainer:
    """The plain loop; contenders replace parts of it.

    Args:
        model: or what stands in for it.
        optimizer: None where nothing is updated.
        around: made anew for each step; the forward pass runs in it.
        engine: of ours.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        engine: OffloadEngine | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.around = around
        self.engine = engine

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients."""
        loss.backward()

    def update(self) -> None:
        """Update the weights, and clear the gradients."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        """Give everything back."""
        if self.engine is not None:
            self.engine.close()


def make(name: str, job: Job, build: Callable[[], nn.Module], directory: Path) -> Trainer:
    """Make a contender.

    Args:
        name: one of this module's names.
        job: what it trains.
        build: makes the model where the job trains it.
        directory: an empty directory on the disk.

    Raises:
        peers.Unavailable: what it needs is not here.
    """
    if name in OURS:
        return _ours(OURS[name], job, build, directory)
    if name in (ZERO_OFFLOAD, ZERO_INFINITY, SUPER_OFFLOAD):
        engine = peers.deepspeed(
            build(), ADAMW, job.device,
            nvme=directory if name == ZERO_INFINITY else None,
            superchip=name == SUPER_OFFLOAD,
            autocast=job.autocast,
        )  # fmt: skip
        return _DeepSpeed(engine)
    if name == FSDP2:
        model, close = peers.fsdp2(build(), job.device)
        trainer = Trainer(model, _adamw(model, job))
        trainer.close = close  # type: ignore[method-assign]
        return trainer
    model = build()
    if name == TORCHAO:
        return Trainer(model, peers.torchao(model, ADAMW))
    if name == RECOMPUTE:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    if name == SAVE_ON_CPU:
        around = _save_on_cpu(job.device)
    elif name == TRL:
        around = peers.trl()
    return Trainer(model, _adamw(model, job), around)


def _adamw(model: nn.Module, job: Job) -> torch.optim.Optimizer | None:
    return torch.optim.AdamW(model.parameters(), fused=True, **ADAMW) if job.updates else None


def _ours(setting: Ours, job: Job, build: Callable[[], nn.Module], directory: Path) -> Trainer:
    engine = OffloadEngine(setting.config(job, directory))
    with engine.building() if setting.weights else nullcontext():
        model = build()
    optimizer = _adamw(model, job)
    if optimizer is None:
        engine.attach(model)
        return Trainer(model, None, nullcontext, engine)
    return Trainer(model, engine.attach(model, optimizer), nullcontext, engine)


def _save_on_cpu(device: str) -> Callable[[], AbstractContextManager[Any]]:
    def around() -> AbstractContextManager[Any]:
        return torch.autograd.graph.save_on_cpu(pin_memory=device != "cpu")

    return around


class _DeepSpeed(Trainer):
    def backward(self, loss: torch.Tensor) -> None:
        """By its engine, which collects gradients."""
        self.model.backward(loss)

    def update(self) -> None:
        """By its engine."""
        self.model.step()

    def close(self) -> None:
        """End it."""
        self.model.destroy()
