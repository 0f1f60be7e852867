"""What the ranks of `test_processes` do: each has an accelerator of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from offload_strategy import OffloadEngine
from tests.training import (
    Numbers,
    assert_same_history,
    attached,
    gradients,
    settings,
    weights,
)

STEPS = 4
LAYERS = 6
WIDTH = 96
#: Seconds after which a mark that does not come is missing.
PATIENCE = 20.0


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks)


def join(rank: int, size: int, directory: Path, kind: str) -> torch.device:
    """Join a process group with the semantics of NCCL; return this rank's device."""
    os.environ["TEST_ACCELERATOR"] = kind
    if kind == "sim":
        from tests.simulated_accelerator import process_group, sim

        sim.set_delays(20, 100)
        backend = process_group.BACKEND
    else:
        backend = "nccl"
    torch.accelerator.set_device_index(rank)
    store = f"file://{directory}/accelerators"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size)
    return torch.device(kind, rank)


def engine_of(
    rank: int, directory: Path, overlap: str, host: str | None, streamed: bool = False
) -> OffloadEngine:
    folder = directory / f"disk-{rank}"
    folder.mkdir()
    sections: dict[str, Any] = {
        "optimizer": {"overlap": overlap, "subgroup_size": 5000},
        "memory": {"pinned": "8MiB"},
        "parameters": {"enabled": streamed, "min_size": "1KiB"},
    }
    return OffloadEngine(settings(folder, host, **sections))


def train(
    engine: OffloadEngine | None,
    device: torch.device,
    sharded: bool,
    eager: bool,
    hook: Any = None,
) -> list[Numbers]:
    """Losses, the gradients of one step, and final weights."""
    net = layers().to(device)
    model: Any = net
    if sharded:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in net:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    else:
        model = DistributedDataParallel(net, bucket_cap_mb=0.05)
    optimizer = attached(engine, model, torch.optim.AdamW(net.parameters(), lr=1e-2))
    if hook is not None:
        hook(net)
    found: list[Numbers] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + device.index)
        inputs = torch.randn(16, WIDTH, generator=generator).to(device)
        loss = model(inputs).pow(2).mean()
        loss.backward()
        if step == 2 and not eager:
            # What backward has left is read here, before step().
            found.append(local(gradients(net)))
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": torch.tensor(loss.item())})
    return [*found, local(weights(net))]


def local(numbers: Numbers) -> Numbers:
    """The part of each that is of this rank."""
    return {n: v.to_local() if isinstance(v, DTensor) else v for n, v in numbers.items()}


def compare(
    rank: int,
    directory: Path,
    kind: str,
    sharded: bool,
    overlap: str,
    host: str | None,
    streamed: bool,
) -> bool:
    """Fail unless all is the same with and without offload; return whether anything has moved."""
    device = join(rank, 2, directory, kind)
    eager = overlap == "eager"
    expected = train(None, device, sharded, eager)
    with engine_of(rank, directory, overlap, host, streamed) as engine:
        assert_same_history(train(engine, device, sharded, eager), expected)
        moved = engine.metrics()["offload/optimizer/written_bytes"] > 0 or host is not None
    dist.barrier()
    dist.destroy_process_group()
    return moved


def overlap_of_reductions(rank: int, directory: Path, kind: str, overlap: str) -> int:
    """How many reductions did not end before backward had reached the first layer.

    The first reduction of each step takes until the compute stream has executed the backward of the
    first layer. It can only end if nothing on the compute stream waits for it before that.
    """
    device = join(rank, 2, directory, kind)
    from tests.simulated_accelerator import process_group, sim

    reached = threading.Event()
    late = 0

    def delayed(collective: Callable[[], None], number: int) -> None:
        nonlocal late
        if number == 0 and not reached.wait(PATIENCE):
            late += 1
        collective()

    def hook(net: nn.Sequential) -> None:
        def begin(module: nn.Module, args: Any) -> None:
            torch.accelerator.synchronize()
            reached.clear()
            group.number = 0

        # The inputs of the second layer have a gradient, which the first layer's backward uses.
        net[1].register_full_backward_hook(lambda *_: sim.launch_python(reached.set))
        net.register_forward_pre_hook(begin)

    group = process_group.default_group()
    group.number = 1  # what DistributedDataParallel sends when it is made is not delayed
    with engine_of(rank, directory, overlap, "64MiB") as engine:
        group.delayed = delayed
        train(engine, device, sharded=False, eager=overlap == "eager", hook=hook)
        group.delayed = None
    dist.barrier()
    dist.destroy_process_group()
    return late
