"""What others offer to somebody whose device memory is too small; each is optional here."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Unavailable(Exception):
    """A peer cannot be used here; says why."""


def trl() -> Callable[[], AbstractContextManager[Any]]:
    """TRL's context for a forward pass: saved tensors go to pinned host memory on a stream."""
    try:
        from trl.models.activation_offloading import OffloadActivations
    except ImportError as error:
        raise Unavailable(f"needs trl: {error}") from error
    return lambda: OffloadActivations(use_pin_memory=True, use_streams=True)


def torchao(model: nn.Module, adamw: Mapping[str, Any]) -> Any:
    """torchao's optimizer: states and a copy of the weights on the host, updated there."""
    try:
        from torchao.optim import CPUOffloadOptimizer
    except ImportError as error:
        raise Unavailable(f"needs torchao: {error}") from error
    return CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=False, fused=True, **adamw
    )


def fsdp2(model: nn.Module, device: str) -> tuple[nn.Module, Callable[[], None]]:
    """FSDP2 over one rank with weights, gradients and states on the host; and how to end it."""
    from torch import distributed
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    _be_alone()
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl"
    try:
        distributed.init_process_group(backend)
        mesh = torch.distributed.device_mesh.init_device_mesh(device, (1,))
    except (RuntimeError, ValueError) as error:
        raise Unavailable(f"no process group with {backend}: {error}") from error
    policy = CPUOffloadPolicy(pin_memory=device != "cpu")
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return model, distributed.destroy_process_group


def deepspeed(
    model: nn.Module,
    adamw: Mapping[str, Any],
    device: str,
    *,
    nvme: Path | None,
    superchip: bool,
    autocast: bool,
) -> Any:
    """DeepSpeed ZeRO-3 whose optimizer is off the device; its engine.

    Args:
        model: to train.
        adamw: hyper-parameters.
        device: type of it.
        nvme: where states go; None for host memory.
        superchip: whether to update as SuperOffload does.
        autocast: whether forward runs in bfloat16 under autocast.
    """
    _be_alone()
    os.environ["DS_ACCELERATOR"] = device
    try:
        import deepspeed
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

        CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # not installed; no compiler
        raise Unavailable(f"DeepSpeed cannot be used here: {error}") from error
    place: dict[str, Any] = {"device": "cpu", "pin_memory": device != "cpu"}
    if nvme is not None:
        place = {
            **place, "device": "nvme", "nvme_path": str(nvme), "buffer_count": 16,
            "pipeline_read": True, "pipeline_write": True,
        }  # fmt: skip
    if superchip:
        place["super_offload"] = True
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {
                "type": "AdamW",
                "params": {**adamw, "torch_adam": False, "adam_w_mode": True},
            },
            "zero_optimization": {
                "stage": 3,
                "contiguous_gradients": True,
                "offload_optimizer": place,
            },
            "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 4},
            "torch_autocast": {"enabled": autocast, "dtype": "bfloat16"},
        },
    )
    return engine


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The layers that repeat: the elements of lists of modules."""
    return [
        block
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for block in module
        if any(True for _ in block.parameters())
    ]


def _be_alone() -> None:
    """Set the environment of a process group of one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
