"""What tests of accelerators share: a small transformer, its data, and memory."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

# Before CUDA is initialised: else cuBLAS may choose another algorithm from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload_strategy import OffloadEngine
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.tiers import HostTier
from offload_strategy.telemetry import Recorder
from offload_strategy.torch_support.accelerator import using_stream
from offload_strategy.units import MiB
from tests.activations.support import noise
from tests.training import Block, Numbers, attached, weights

DEVICE = os.environ["TEST_ACCELERATOR"]
"""Type of the device under test: "cuda", or "sim", which is simulated; see tests/conftest.py."""

device_module: Any = None if DEVICE == "none" else torch.get_device_module(DEVICE)
WIDTH = 64

#: A model and a batch whose saved tensors are much larger than its weights.
SIZE = (256, 12) if DEVICE == "cuda" else (64, 12)
BATCH = {"rows": 16, "length": 256} if DEVICE == "cuda" else {"rows": 16, "length": 128}
#: Capacities of host memory before the disk: none, some, and enough for everything.
HOSTS = [None, "1MiB", "1GiB"]
#: With it, all weights are streamed.
STREAMED = {"enabled": True, "min_size": 1}


def new_stream(priority: int = 0) -> torch.Stream:
    device = torch.device(DEVICE, torch.accelerator.current_device_index())
    return torch.Stream(device, priority=priority)


def sleep(cycles: int) -> None:
    """Keep the current stream busy; a GPU counts about two million cycles in a millisecond."""
    if DEVICE == "cuda":
        torch.cuda._sleep(cycles)
    else:
        device_module.sleep(cycles // 2000)


def idle_memory() -> int:
    """Bytes in use of a device that has done its work, when all that is not needed was freed."""
    gc.collect()
    torch.accelerator.synchronize()
    device_module.empty_cache()
    return device_module.memory_allocated()


@contextmanager
def memory_beyond(nbytes: int) -> Iterator[None]:
    """Allow so many bytes more than are in use."""
    in_use = idle_memory()
    if DEVICE == "sim":
        limit, most, all_of_it = partial(device_module.set_memory_limit, 0), in_use + nbytes, -1
    else:
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        share = (torch.cuda.memory_reserved() + nbytes) / total
        limit, most, all_of_it = torch.cuda.set_per_process_memory_fraction, min(1.0, share), 1.0
    limit(most)
    try:
        yield
    finally:
        limit(all_of_it)


@contextmanager
def delays(seed: int, kernel_us: int, copy_us: int) -> Iterator[None]:
    """Each kernel and each copy takes a random time of at most so long on a simulated device."""
    if DEVICE != "sim":
        yield
        return
    device_module.set_seed(seed)
    device_module.set_delays(kernel_us, copy_us)
    try:
        yield
    finally:
        torch.accelerator.synchronize()
        device_module.set_delays(0, 0)


def peaks(step: Callable[[int], object], count: int) -> list[int]:
    """The most bytes in use during each of some steps, which begin with an idle device."""
    found = []
    for number in range(count):
        torch.accelerator.synchronize()
        device_module.reset_peak_memory_stats()
        step(number)
        torch.accelerator.synchronize()
        found.append(device_module.max_memory_allocated())
    return found


def replaced_in_host_memory(copies: Any, *, late: bool) -> list[torch.Tensor]:
    """Bytes that one stream reads while another puts what replaces them, and those bytes.

    With `late`, the second stream puts while the first bytes are still on their way to the host.
    They are all ones, then all twos.
    """
    pool = BufferPool(16 * MiB)
    store = TensorStore(pool, Recorder(), write_behind=16 * MiB)
    store.copies = store._writer.copies = store._reader.copies = copies
    tiers = [HostTier("host", 8 * MiB)]
    one, two = new_stream(), new_stream()
    first, second = (torch.full((MiB,), n, dtype=torch.uint8, device=DEVICE) for n in (1, 2))
    torch.accelerator.synchronize()
    engine = copies[first.device]
    with using_stream(one):
        outgoing, _ = engine._copying(one)
        if late:
            with using_stream(outgoing):
                sleep(40_000_000)
        ticket = store.put(first, "optimizer", tiers)
        if not late:
            outgoing.synchronize()
            store.registry.release_written()
            engine.release_sources(0)
            sleep(40_000_000)
        read = store.get(ticket)
    if late:
        two.wait_stream(one)
    with using_stream(two):
        store.free(ticket, keeps_buffer=True)
        ticket = store.put(second, "optimizer", tiers, replaces=ticket)
        engine.release_sources(0)
    torch.accelerator.synchronize()
    found = [read.cpu(), store.get(ticket).cpu()]
    store.close()
    pool.close()
    return found


def config_of(disk: Any, **sections: Any) -> dict[str, Any]:
    """With the defaults of what is not given, and all the space that the disk has."""
    return {"tiers": [{"name": "nvme", "kind": "ssd", "path": str(disk)}], **sections}


class Deep(nn.Module):
    """Saves a tensor as large as its input in each layer.

    Args:
        layers: how many.
        cycles: keep the device busy in each layer, in forward and in backward.
    """

    def __init__(self, layers: int, cycles: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layers, self.cycles = layers, cycles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.layers):
            x = torch.sin(x) * 1.5
            if self.cycles:
                sleep(self.cycles)
                x.register_hook(lambda _: sleep(self.cycles))
        return x * self.scale


class Transformer(nn.Module):
    """A few blocks; the first weight is also the last."""

    def __init__(self, width: int = WIDTH, depth: int = 4, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Linear(32, width, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x.to(self.embedding.weight.dtype))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.linear(x, self.embedding.weight.t())


def make(
    *sizes: int,
    engine: OffloadEngine | None = None,
    seed: int = 0,
    dropout: bool = True,
    device: str = DEVICE,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
) -> nn.Module:
    """A transformer on the device, attached if there is an engine."""
    torch.manual_seed(seed)
    model = Transformer(*sizes, recompute=recompute)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not dropout:
            module.p = 0.0
    model.to(device, dtype)
    if engine is not None:
        engine.attach(model)
    return model


def move(model: nn.Module, device: str) -> None:
    """Move a model as CUDA does: its parameters stay the same, with other data.

    By `model.to()`, a simulated device would have new ones, which the optimizer does not know.
    """
    for parameter in model.parameters():
        hooks = parameter._post_accumulate_grad_hooks  # they go with the data that is swapped
        torch._C._swap_tensor_impl(parameter, nn.Parameter(parameter.detach().to(device)))
        parameter._post_accumulate_grad_hooks = hooks


def batch(number: int, rows: int = 4, length: int = 64) -> torch.Tensor:
    return noise(rows, length, 32, seed=number).to(DEVICE)


def loss_of(model: nn.Module, number: int, **sizes: int) -> torch.Tensor:
    return model(batch(number, **sizes)).float().pow(2).mean()


def stir() -> None:
    """Use and overwrite the device memory that was just freed."""
    for _ in range(8):
        torch.full((1 << 18,), float("nan"), device=DEVICE)


def train(model: nn.Module, optimizer: Any, steps: range, **sizes: int) -> list[Numbers]:
    """Losses of some steps, which are told apart by their numbers."""
    found = []
    for step in steps:
        torch.manual_seed(step)
        loss = loss_of(model, step, **sizes)
        stir()
        loss.backward()
        stir()
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": loss.detach()})
        del loss
    return found


def five_steps(engine: OffloadEngine | None) -> list[Numbers]:
    """Losses of five steps, states and weights after them, with or without offload."""
    model = make(32, 2)
    optimizer = attached(engine, model, torch.optim.AdamW(model.parameters(), 1e-3))
    found = train(model, optimizer, range(5), rows=2, length=16)
    states = optimizer.state_dict()["state"]
    found.append({f"{i} {k}": v for i, each in states.items() for k, v in each.items()})
    return [*found, weights(model)]
