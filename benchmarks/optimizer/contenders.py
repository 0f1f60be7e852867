"""The contenders: plain PyTorch, DeepSpeed, and this package in several settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.activations.contenders import to_files
from benchmarks.optimizer import deepspeed_peer, variants
from benchmarks.optimizer.background_io import BackgroundIo
from benchmarks.optimizer.tasks import Task
from benchmarks.optimizer.tensornvme_peer import TensorNVMe
from offload_strategy import OffloadEngine
from offload_strategy.config import DIRECTORY_VARIABLE

PLAIN = "plain PyTorch"
DEEPSPEED = "DeepSpeed ZeRO-3, NVMe"
DEEPSPEED_DEFAULTS = "DeepSpeed ZeRO-3, NVMe, its defaults"
DEEPSPEED_HOST = "DeepSpeed ZeRO-3, host memory"
DEEPSPEEDS = (DEEPSPEED, DEEPSPEED_DEFAULTS, DEEPSPEED_HOST)
TENSORNVME = "TensorNVMe, states on disk"
#: All of these may be unable to run here.
PEERS = (*DEEPSPEEDS, TENSORNVME)
#: Plain PyTorch, while as many bytes are transferred.
MOVING = "plain, with concurrent I/O"
RECOMPUTE, FILES = "plain, recomputed blocks", "plain, saved tensors in one file each"
#: Begins the names of our presets.
_PRESET = "preset "
_ITEMSIZE = {"float32": 4, "bfloat16": 2}
#: AdamW's own, so that every contender computes the same.
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True)
class Ours:
    """This package in one setting.

    Args:
        overlap: of the optimizer.
        activations: whether they are offloaded to the same disk.
        state_dtype: of the optimizer.
        host_share: of the states' bytes that a dram tier in front of the disk may hold.
        pinned: bytes of staging buffers.
        budget: of activations.
        paths: directories of the ssd tier; empty for one in the contender's own directory.
        threads: of I/O; 0 for what the package chooses.
        checksum: as `io.checksum` of the config.
        without: parts of the engine that are switched off; see `variants`.
    """

    overlap: str = "commit"
    activations: bool = False
    state_dtype: str = "float32"
    host_share: float = 0.0
    pinned: str = "256MiB"
    budget: str = "auto"
    paths: tuple[str, ...] = ()
    threads: int = 0
    checksum: str = "auto"
    without: tuple[str, ...] = ()

    def options(self) -> dict[str, Any]:
        """For `make`."""
        return {"contender": "ours", "ours": asdict(self)}

    def states_bytes(self, parameters: int) -> int:
        """Bytes of both moments of Adam.

        Args:
            parameters: how many.
        """
        return 2 * parameters * _ITEMSIZE[self.state_dtype]

    def config(self, directory: Path, parameters: int) -> dict[str, Any]:
        """Of the engine."""
        paths = list(self.paths) or [str(directory)]
        tiers: list[dict[str, Any]] = [{"name": "disk", "kind": "ssd", "path": paths}]
        if self.host_share:
            capacity = int(self.host_share * self.states_bytes(parameters))
            tiers.insert(0, {"name": "host", "kind": "dram", "capacity": capacity})
        return {
            "tiers": tiers,
            "activations": {
                "enabled": self.activations,
                "tiers": ["disk"],
                "budget": self.budget,
            },
            "optimizer": {"overlap": self.overlap, "state_dtype": self.state_dtype},
            "memory": {"pinned": self.pinned},
            "io": {
                "checksum": self.checksum,
                **({"threads": self.threads} if self.threads else {}),
            },
        }


class Trainer(Protocol):
    """Trains a model; what `subject` measures lies between these calls."""

    forward: Any

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients."""

    def clip(self, limit: float) -> float:
        """Clip the norm of all gradients; returns the norm."""

    def step(self) -> None:
        """Update the weights."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def metrics(self) -> dict[str, float]:
        """The engine's figures; nothing for others."""

    def close(self) -> None:
        """Give everything back."""


@dataclass
class _PyTorch:
    """The plain loop, with or without an engine."""

    forward: torch.nn.Module
    optimizer: torch.optim.Optimizer
    engine: OffloadEngine | None = None
    parameters: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = list(self.forward.parameters())

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip(self, limit: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def metrics(self) -> dict[str, float]:
        return {} if self.engine is None else self.engine.metrics()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


@dataclass
class _Moving(_PyTorch):
    """The plain loop while another process moves bytes."""

    background_io: BackgroundIo = field(kw_only=True)

    def zero_grad(self) -> None:
        super().zero_grad()
        self.background_io.step_ended()

    def close(self) -> None:
        self.background_io.close()


def make(options: dict[str, Any], task: Task, directory: Path) -> Trainer:
    """Make a contender.

    Args:
        options: of `Ours.options`, `plain_options` or `deepspeed_options`.
        task: what it trains.
        directory: an empty directory on the disk.

    Raises:
        deepspeed_peer.Unavailable: a peer cannot be used here.
    """
    if options["contender"] in DEEPSPEEDS:
        settings = deepspeed_peer.Settings(**options["settings"])
        return deepspeed_peer.DeepSpeed(task.model(), ADAMW, settings, directory)
    model = task.model()
    adamw = {**ADAMW, **options.get("adamw", {})}
    if options["contender"] == TENSORNVME:
        return TensorNVMe(model, adamw, directory)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adamw)
    if options["contender"] == PLAIN:
        return _PyTorch(model, optimizer)
    if options["contender"] == MOVING:
        background_io = BackgroundIo(model, directory)
        return _Moving(
            _Around(model, background_io.forward), optimizer, background_io=background_io
        )
    if options["contender"] == RECOMPUTE:
        return _PyTorch(_Recomputed(model), optimizer)
    if options["contender"] == FILES:
        return _PyTorch(_Around(model, lambda: to_files(directory)), optimizer)
    if options["contender"].startswith(_PRESET):
        # A preset names no place.
        os.environ[DIRECTORY_VARIABLE] = str(directory)
        engine = OffloadEngine(options["contender"].removeprefix(_PRESET))
        return _PyTorch(model, engine.attach(model, optimizer), engine)
    ours = Ours(**options["ours"])
    without = [variants.WITHOUT[name](model) for name in ours.without]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = OffloadEngine(ours.config(directory, parameters))
    trainer = _PyTorch(model, engine.attach(model, optimizer), engine)
    for part in without:
        part.attached(engine)
    return trainer


class _Around(torch.nn.Module):
    """A model whose forward pass runs in a context."""

    def __init__(
        self, inner: torch.nn.Module, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        self.inner = inner
        self._context = context

    def forward(self, *args: Any) -> Any:
        """The model's."""
        with self._context():
            return self.inner(*args)


class _Recomputed(_Around):
    """A model whose blocks are computed again in backward, each from its input."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__(inner, nullcontext)
        for name, block in list(inner.blocks.named_children()):  # type: ignore[union-attr]
            setattr(inner.blocks, name, _Checkpointed(block))


class _Checkpointed(torch.nn.Module):
    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def simple_options(name: str) -> dict[str, Any]:
    """Options of a contender that has none."""
    return {"contender": name}


def preset(name: str) -> str:
    """Name of the contender that trains with a preset of ours."""
    return f"{_PRESET}{name}"


def plain_options() -> dict[str, Any]:
    """Options of plain PyTorch."""
    return {"contender": PLAIN}


def deepspeed_options(settings: deepspeed_peer.Settings) -> dict[str, Any]:
    """Options of DeepSpeed."""
    name = DEEPSPEED_HOST if settings.on_host else DEEPSPEED
    return {"contender": name, "settings": asdict(settings)}
