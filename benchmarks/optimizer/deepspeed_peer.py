"""DeepSpeed ZeRO-3 with the optimizer's states on NVMe, on its CPU accelerator.

It needs libaio, ninja and a compiler, which builds its extensions at first use. Weights stay where
the model computes (on the CPU that is the same memory); states are read, updated by its own
CPUAdam and written, in `engine.step()`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from offload_strategy.units import MiB


class Unavailable(Exception):
    """DeepSpeed cannot be used here; says why."""


@dataclass(frozen=True)
class Aio:
    """Settings of its asynchronous I/O; as it comes, unless others are given."""

    block_size: int = 1 * MiB
    queue_depth: int = 8
    intra_op_parallelism: int = 1
    single_submit: bool = False
    overlap_events: bool = True


@dataclass(frozen=True)
class Settings:
    """What is searched for its best.

    Args:
        sub_group_size: parameters that are updated at a time.
        aio: settings of the I/O.
        buffer_count: staging buffers. With Adam 4 of them, the default, end in an assertion.
        pipelined: whether the next subgroup is read, and the last one written, meanwhile.
        on_host: whether states stay in host memory (ZeRO-Offload) instead.
    """

    sub_group_size: int = 10**9
    aio: Aio = field(default_factory=Aio)
    buffer_count: int = 16
    pipelined: bool = True
    on_host: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.aio, dict):  # from JSON
            object.__setattr__(self, "aio", Aio(**self.aio))

    def shown(self) -> str:
        """For people."""
        if self.on_host:
            return "offload_optimizer: cpu"
        aio = self.aio
        return (
            f"sub_group_size {self.sub_group_size:,}, buffer_count {self.buffer_count}, "
            f"pipeline_read and pipeline_write {str(self.pipelined).lower()}, aio: block_size "
            f"{aio.block_size}, queue_depth {aio.queue_depth}, intra_op_parallelism "
            f"{aio.intra_op_parallelism}, overlap_events {str(aio.overlap_events).lower()}"
        )


def io_candidates() -> list[Settings]:
    """Settings of I/O that are tried, with the default subgroup."""
    return [
        Settings(aio=Aio(1 * MiB, 16, 1)),
        Settings(aio=Aio(1 * MiB, 32, 2)),
        Settings(aio=Aio(4 * MiB, 16, 2)),
    ]


def subgroup_candidates(best: Settings, parameters: int) -> list[Settings]:
    """Subgroups that are tried next, with the best settings of I/O.

    Args:
        best: of `io_candidates`.
        parameters: of the model.
    """
    return [
        replace(best, sub_group_size=max(1, parameters // 4)),
        replace(best, sub_group_size=max(1, parameters // 16)),
        replace(best, pipelined=False),
    ]


def config(settings: Settings, adamw: dict[str, Any], directory: Path) -> dict[str, Any]:
    """What DeepSpeed is made of.

    Args:
        settings: what was searched for its best.
        adamw: hyper-parameters.
        directory: on the disk.
    """
    place: dict[str, Any] = {
        "device": "nvme",
        "nvme_path": str(directory),
        "pin_memory": True,
        "buffer_count": settings.buffer_count,
        "pipeline_read": settings.pipelined,
        "pipeline_write": settings.pipelined,
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {
            "type": "AdamW",
            "params": {**adamw, "torch_adam": False, "adam_w_mode": True},
        },
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": settings.sub_group_size,
            "contiguous_gradients": True,
            "offload_optimizer": (
                {"device": "cpu", "pin_memory": True} if settings.on_host else place
            ),
        },
        "aio": asdict(settings.aio),
        "zero_allow_untested_optimizer": True,
    }


def be_alone(accelerator: str = "cpu") -> None:
    """Set the environment of a process group of one; before DeepSpeed is imported.

    Args:
        accelerator: type of the device that computes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        DS_ACCELERATOR=accelerator,
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def engine(
    build: Callable[[], torch.nn.Module],
    accelerator: str,
    settings: Settings,
    adamw: dict[str, Any],
    directory: Path | None,
    *,
    autocast: bool,
) -> Any:
    """Its engine on a device, alone.

    Args:
        build: makes the model there.
        accelerator: type of the device.
        settings: of states on the host or in the directory.
        adamw: hyper-parameters.
        directory: on the disk, if states go there.
        autocast: whether forward runs in bfloat16 under autocast.

    Raises:
        Unavailable: it is not installed, or its operators cannot be compiled.
    """
    be_alone(accelerator)
    try:
        import deepspeed
        from deepspeed.ops.op_builder import CPUAdamBuilder  # that of the accelerator

        CPUAdamBuilder().load(verbose=False)
    except Exception as error:
        raise Unavailable(f"DeepSpeed cannot be used here: {error}") from error
    options = config(settings, adamw, directory or Path())
    options["torch_autocast"] = {"enabled": autocast, "dtype": "bfloat16"}
    model = build()
    parameters = list(model.parameters())
    return deepspeed.initialize(model=model, model_parameters=parameters, config=options)[0]


def remove_stale_locks() -> None:
    """Remove what a build that was killed has left, for which the next one would wait for ever.

    torch locks the folder of an extension by a file that the building process holds open.
    """
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not root:
        # Needs setuptools, which not every environment has.
        from torch.utils.cpp_extension import get_default_build_root

        root = get_default_build_root()
    locks = {lock.resolve() for lock in Path(root).glob("**/lock")}
    for process in psutil.process_iter() if locks else ():
        with contextlib.suppress(psutil.Error):
            locks -= {Path(file.path) for file in process.open_files()}
    for lock in locks:
        lock.unlink(missing_ok=True)


class DeepSpeed:
    """A contender; see `contenders.Trainer`.

    Args:
        model: to train.
        adamw: hyper-parameters of AdamW.
        settings: of its I/O and subgroups.
        directory: where its files go.

    Raises:
        Unavailable: it is not installed, or cannot be built.
    """

    def __init__(
        self, model: torch.nn.Module, adamw: dict[str, Any], settings: Settings, directory: Path
    ) -> None:
        be_alone()
        try:
            remove_stale_locks()
            import deepspeed
            from deepspeed.ops.op_builder import AsyncIOBuilder
            from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

            AsyncIOBuilder().load(verbose=False)
            CPUAdamBuilder().load(verbose=False)
        except Exception as error:  # not installed; no compiler, no ninja, no libaio
            raise Unavailable(f"DeepSpeed cannot be used here: {error}") from error
        self.forward, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=config(settings, adamw, directory),
        )

    def backward(self, loss: torch.Tensor) -> None:
        """See `contenders.Trainer`."""
        self.forward.backward(loss)

    def clip(self, limit: float) -> float:
        """It clips by itself, as its config says; not used here."""
        raise NotImplementedError("DeepSpeed clips within its own step")

    def step(self) -> None:
        """See `contenders.Trainer`."""
        self.forward.step()

    def zero_grad(self) -> None:
        """Done by `step`."""

    def metrics(self) -> dict[str, float]:
        """None of ours."""
        return {}

    def close(self) -> None:
        """End it."""
        self.forward.destroy()
