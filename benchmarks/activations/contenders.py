"""The ways to treat activations that are compared, each a context around a forward pass."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from offload_strategy import OffloadEngine

KEEP, RECOMPUTE, FILES = "keep", "recompute", "files"
OFFLOAD_DISK, OFFLOAD_HOST = "offload to disk", "offload to host"
CONTENDERS = (KEEP, RECOMPUTE, OFFLOAD_DISK, OFFLOAD_HOST, FILES)
#: What each is, for the table.
MEANING = {
    KEEP: "every saved tensor stays in memory",
    RECOMPUTE: "block by block, model.gradient_checkpointing_enable() (non-reentrant)",
    OFFLOAD_DISK: "OffloadEngine with an ssd tier",
    OFFLOAD_HOST: "OffloadEngine with a dram tier; on the CPU that is the same memory",
    FILES: "saved_tensors_hooks with torch.save and torch.load, one file per tensor (tutorial)",
}


@dataclass
class Contender:
    """How a model is trained.

    Args:
        around: made anew for each step; the forward pass runs in it.
        engine: of ours, if it is one of ours.
    """

    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    engine: OffloadEngine | None = None


def prepare(
    kind: str,
    model: Any,
    directory: Path,
    sections: dict[str, dict[str, Any]],
    host_capacity: str,
) -> Contender:
    """Make a model train in one of the ways.

    Args:
        kind: of `CONTENDERS`.
        model: of Transformers.
        directory: an empty directory on the disk.
        sections: of the engine's config, on top of the defaults.
        host_capacity: of the dram tier.
    """
    if kind == KEEP:
        return Contender()
    if kind == RECOMPUTE:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return Contender()
    if kind == FILES:
        return Contender(lambda: to_files(directory))
    host = {"name": "host", "kind": "dram", "capacity": host_capacity}
    disk = {"name": "disk", "kind": "ssd", "path": str(directory)}
    engine = OffloadEngine(
        {
            "tiers": [disk if kind == OFFLOAD_DISK else host],
            "mode": "always",
            "optimizer": {"enabled": False},
            **sections,
        }
    )
    engine.attach(model)
    return Contender(engine.forward, engine)


class _File:
    """A file that goes with its owner."""

    def __init__(self, directory: Path) -> None:
        self.name = os.path.join(directory, uuid.uuid4().hex)

    def __del__(self) -> None:
        os.unlink(self.name)


def to_files(directory: Path) -> saved_tensors_hooks:
    """The hooks of the PyTorch tutorial on saved tensors: large ones go to a file each."""

    def pack(tensor: torch.Tensor) -> torch.Tensor | _File:
        if tensor.numel() < 1000:
            return tensor
        file = _File(directory)
        torch.save(tensor, file.name)
        return file

    def unpack(packed: torch.Tensor | _File) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        loaded: torch.Tensor = torch.load(packed.name)
        return loaded

    return saved_tensors_hooks(pack, unpack)


def scratch(directory: Path) -> tempfile.TemporaryDirectory[str]:
    """A directory of a process's own on the disk."""
    return tempfile.TemporaryDirectory(prefix="benchmarks-activations-", dir=directory)
