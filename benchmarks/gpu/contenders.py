"""Who trains on a device: plain PyTorch, what others offer for too little memory, this package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from benchmarks.activations.models import Shape, build
from benchmarks.gpu import device
from benchmarks.gpu.device import Unavailable
from benchmarks.optimizer import deepspeed_peer
from offload_strategy import OffloadEngine
from offload_strategy.units import GiB, MiB

ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

#: Of host memory that is available, the share that tiers and buffers of ours may take.
_HOST_SHARE = 0.6

PLAIN, RECOMPUTE = "plain", "plain, blocks computed again"
SAVE_ON_CPU, TRL = "torch's save_on_cpu, pinned", "TRL's OffloadActivations"
TORCHAO, FSDP2 = "torchao's CPUOffloadOptimizer", "FSDP2, CPUOffloadPolicy"
ZERO_HOST, ZERO_DISK = (
    "DeepSpeed ZeRO-3, states on the host",
    "DeepSpeed ZeRO-3, states on the disk",
)
#: They make a process group, or settings of the whole process, and have a process of their own.
ALONE = (FSDP2, ZERO_HOST, ZERO_DISK)


@dataclass(frozen=True)
class Job:
    """What is trained: a GPT.

    Args:
        shape: how large.
        batch: sequences of a step.
        updates: whether an optimizer takes part; else steps end with backward.
        autocast: whether forward runs in bfloat16 under autocast.
        limit: bytes of device memory for each parameter; None for all that there are.
        recompute: whether all blocks are computed again in backward.
        small: whether it is a model of no size, of which even small tensors must leave.
    """

    shape: Shape
    batch: int
    updates: bool = False
    autocast: bool = False
    limit: int | None = None
    recompute: bool = False
    small: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Job:
        """Of what `asdict` made, for JSON."""
        return cls(**{**options, "shape": Shape(**options["shape"])})

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.shape.sequence

    @property
    def memory_limit(self) -> int | None:
        """Bytes of device memory."""
        shape = self.shape
        parameters = 12 * shape.layers * shape.width**2
        parameters += (1 if shape.tied else 2) * shape.vocabulary * shape.width
        return None if self.limit is None else self.limit * parameters

    def build(self, kind: str) -> Any:
        """A GPT with random weights, on a type of device."""
        model = build("GPT", self.shape, kind)
        if self.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def tiny(self, width: int = 64, layers: int = 2) -> Job:
        """The same with a model of no size, to see that everything runs."""
        shape = replace(
            self.shape, width=width, layers=layers, heads=2, sequence=64, vocabulary=512, tied=True
        )
        return replace(self, shape=shape, batch=2, small=True)


# ---------------------------------------------------------------------- this package
TO_HOST, TO_DISK = "ours: activations to the host", "ours: activations to the disk"
AUTO = "ours: activations, defaults"
STATES_DEVICE = "ours: states on the device, then the host"
STATES_HOST, STATES_HOST_EAGER = "ours: states on the host", "ours: states on the host, eager"
STATES_DISK, STATES_DISK_EAGER = "ours: states on the disk", "ours: states on the disk, eager"
LARGE, LARGE_STREAMED = "ours: states and activations away", "ours: weights streamed, too"
LARGE_DEVICE = "ours: states on the device first"

_KEPT, _ALL, _AUTO = {"enabled": False}, {"budget": "100%"}, {"budget": "auto"}
_COMMIT, _EAGER = {"overlap": "commit"}, {"overlap": "eager"}
#: Weights in bfloat16, updated through copies in float32.
_NARROW = {"overlap": "eager", "master_weights": True}
#: Tiers in order; activations; the optimizer; whether weights are streamed.
OURS: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {
    TO_HOST: ("host", _ALL, _KEPT, False),
    TO_DISK: ("disk", _ALL, _KEPT, False),
    AUTO: ("host disk", _AUTO, _KEPT, False),
    STATES_DEVICE: ("device host", _KEPT, _EAGER, False),
    STATES_HOST: ("host", _KEPT, _COMMIT, False),
    STATES_HOST_EAGER: ("host", _KEPT, _EAGER, False),
    STATES_DISK: ("disk", _KEPT, _COMMIT, False),
    STATES_DISK_EAGER: ("disk", _KEPT, _EAGER, False),
    LARGE: ("host disk", _AUTO, _NARROW, False),
    LARGE_DEVICE: ("device host disk", _AUTO, _NARROW, False),
    LARGE_STREAMED: ("host disk", _AUTO, _NARROW, True),
}


def _config(name: str, job: Job, directory: Path) -> dict[str, Any]:
    """Of one of ours, with the host memory that this machine has for it."""
    tiers, activations, optimizer, streamed = OURS[name]
    room = 256 * MiB if job.small else int(_HOST_SHARE * psutil.virtual_memory().available)
    pinned = min(8 * GiB, room // 8)
    memory = min(job.memory_limit or sys.maxsize, torch.accelerator.get_memory_info(0)[0])
    made: dict[str, dict[str, Any]] = {
        "device": {"name": "device", "kind": "device", "capacity": memory // 3},
        "host": {"name": "host", "kind": "dram", "capacity": room - pinned},
        "disk": {"name": "disk", "kind": "ssd", "path": str(directory)},
    }
    return {
        "tiers": [made[tier] for tier in tiers.split()],
        "activations": {**({"min_size": 1} if job.small else {}), **activations},
        "optimizer": {**({"subgroup_size": 50_000} if job.small else {}), **optimizer},
        "parameters": {"enabled": streamed},
        "memory": {"pinned": pinned},
    }


# ---------------------------------------------------------------------- all of them
@dataclass
class Trainer:
    """The plain loop; contenders replace parts of it.

    The optimizer is None where nothing is updated; the forward pass runs in a context that is made
    anew for each step; `close` gives everything back.
    """

    model: Any
    optimizer: Any = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    engine: OffloadEngine | None = None
    close: Callable[[], Any] = lambda: None

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        """Update the weights, and clear the gradients."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()


class _DeepSpeed(Trainer):
    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def update(self) -> None:
        self.model.step()


def make(name: str, job: Job, kind: str, directory: Path) -> Trainer:
    """A contender with a job, a type of device and a directory; Unavailable if it has no chance."""
    if name in OURS:
        return _ours(name, job, kind, directory)
    if name in (ZERO_HOST, ZERO_DISK):
        engine = _deepspeed(job, kind, directory if name == ZERO_DISK else None)
        return _DeepSpeed(engine, close=engine.destroy)
    if name == FSDP2:
        return _fsdp2(job, kind)
    around = {SAVE_ON_CPU: lambda: save_on_cpu, TRL: trl}.get(name, lambda: nullcontext)()
    make_optimizer = _torchao() if name == TORCHAO else _adamw
    model = replace(job, recompute=job.recompute or name == RECOMPUTE).build(kind)
    return Trainer(model, make_optimizer(model) if job.updates else None, around)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)


def _ours(name: str, job: Job, kind: str, directory: Path) -> Trainer:
    _, _, optimizer_section, streamed = OURS[name]
    if "master_weights" in optimizer_section:
        job = replace(job, shape=replace(job.shape, dtype="bfloat16"))
    engine = OffloadEngine(_config(name, job, directory))
    with ExitStack() as stack:
        stack.callback(engine.close)
        with engine.building() if streamed else nullcontext():
            model = job.build(kind)
        optimizer: Any = None
        if job.updates:
            optimizer = engine.attach(model, _adamw(model))
        else:
            engine.attach(model)
        return Trainer(model, optimizer, engine=engine, close=stack.pop_all().close)


save_on_cpu = partial(torch.autograd.graph.save_on_cpu, pin_memory=True)


def trl() -> Callable[[], AbstractContextManager[Any]]:
    """TRL's context for a forward pass: saved tensors go to pinned host memory on a stream."""
    try:
        from trl.models.activation_offloading import OffloadActivations
    except Exception as error:  # what it imports may not be here, or be too new
        raise Unavailable(f"needs trl: {error}") from error
    return lambda: OffloadActivations(use_pin_memory=True, use_streams=True)


def _torchao() -> Callable[[nn.Module], Any]:
    try:
        from torchao.optim import CPUOffloadOptimizer
    except Exception as error:
        raise Unavailable(f"needs torchao: {error}") from error
    return lambda model: CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=False, fused=True, **ADAMW
    )


def _fsdp2(job: Job, kind: str) -> Trainer:
    """One rank with weights, gradients and states on the host."""
    from torch import distributed
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    if kind == device.SIMULATED:
        from tests.simulated_accelerator import process_group

        backend = process_group.BACKEND
    elif kind in distributed.Backend.default_device_backend_map:
        backend = f"cpu:gloo,{kind}:{distributed.Backend.default_device_backend_map[kind]}"
    else:
        raise Unavailable(f"torch.distributed has no backend for {kind}")
    deepspeed_peer.be_alone(kind)
    distributed.init_process_group(backend)
    mesh = distributed.device_mesh.init_device_mesh(kind, (1,))
    model = job.build(kind)
    lists = [found for found in model.modules() if isinstance(found, nn.ModuleList)]
    blocks = [block for found in lists for block in found if any(True for _ in block.parameters())]
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=True))
    return Trainer(model, _adamw(model), close=distributed.destroy_process_group)


def _deepspeed(job: Job, kind: str, directory: Path | None) -> Any:
    """The engine of ZeRO-3 with its states in a directory, or on the host."""
    if kind == device.SIMULATED:
        raise Unavailable("DeepSpeed does not know the simulated accelerator")
    settings = deepspeed_peer.Settings(
        aio=deepspeed_peer.Aio(queue_depth=32, intra_op_parallelism=4), on_host=directory is None
    )
    try:
        return deepspeed_peer.engine(
            lambda: job.build(kind), kind, settings, ADAMW, directory, autocast=job.autocast
        )
    except deepspeed_peer.Unavailable as why:
        raise Unavailable(str(why)) from why
