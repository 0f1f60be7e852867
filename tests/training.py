"""What the tests of training share: engines, comparisons by bits, and plain training loops."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from offload_strategy import OffloadEngine

Numbers = dict[str, torch.Tensor]
"""Anything that must be the same with and without offload, by name."""


class Block(nn.Module):
    """A transformer block with dropout, for a width that four heads share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).unbind(2)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


def in_turn(options: Iterable[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Each of the first options once; the others take turns beside them."""
    return list(zip(options, *map(cycle, others), strict=False))


def settings(directory: Path | None, host: str | None = None, **sections: Any) -> dict[str, Any]:
    """A config with which nearly everything of a tiny model leaves, and options by section on top.

    Its tiers are a dram tier of the capacity `host` and an ssd tier in the directory, if given.
    """
    tiers: list[dict[str, Any]] = []
    if host is not None:
        tiers.append({"name": "host", "kind": "dram", "capacity": host})
    if directory is not None:
        tiers.append({"name": "nvme", "kind": "ssd", "path": str(directory), "capacity": "64MiB"})
    config: dict[str, Any] = {
        "tiers": tiers,
        "activations": {"min_size": 1, "budget": "100%"},
        "optimizer": {"subgroup_size": 500},
        "io": {"threads": 2, "block_size": "64KiB"},
        "memory": {"pinned": "64MiB"},
    }
    for name, options in sections.items():
        config[name] = {**config.get(name, {}), **options}
    return config


def activations_only(directory: Path | None, **options: Any) -> OffloadEngine:
    """An engine that offloads every saved tensor and no optimizer."""
    host = options.pop("host", None)
    return OffloadEngine(
        settings(directory, host, activations=options, optimizer={"enabled": False})
    )


def attached(engine: OffloadEngine | None, model: nn.Module | None, optimizer: Optimizer) -> Any:
    """The optimizer to use: that of the engine, if there is one."""
    return optimizer if engine is None else engine.attach(model, optimizer)


def same_with_and_without(
    run: Callable[[OffloadEngine | None], Sequence[Numbers]], config: Any
) -> dict[str, float]:
    """Fail unless a run has the same numbers with an engine; return the engine's metrics."""
    expected = run(None)
    with OffloadEngine(config) as engine:
        assert_same_history(run(engine), expected)
        return engine.metrics()


def on_disk(engine: OffloadEngine) -> None:
    """Wait until everything that was given away is on the disk and nowhere else."""
    engine._resources.store.wait_for_writes()


def break_disk(patch: Any, call: str, number: int) -> None:
    """Let a function of `os` fail with an error number."""

    def broken(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    patch.setattr(os, call, broken)


def moved(engine: OffloadEngine, client: str = "activations", verb: str = "written") -> int:
    """Bytes that a client wrote, read or had forwarded."""
    return int(engine.metrics()[f"offload/{client}/{verb}_bytes"])


def left_bytes(metrics: Mapping[str, float], client: str = "activations") -> float:
    """Bytes of a client that left: written, or handed back while they were on their way."""
    return sum(metrics[f"offload/{client}/{verb}_bytes"] for verb in ("written", "forwarded"))


def stored_states(engine: OffloadEngine) -> int:
    """Bytes of states that updates have given to the store, whether their writes have ended."""
    return sum(update.written_bytes for update in engine._recorder.updates)


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Dtype, shape and the very bytes: NaNs compare, and zeros have a sign."""
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor
        return (tensor.layout, bits(tensor.indices()), bits(tensor.values()))
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    plain = plain.clone(memory_format=torch.contiguous_format)  # one element may have any stride
    return (tensor.dtype, tuple(tensor.shape), plain.view(torch.uint8).numpy().tobytes())


def assert_same_bits(got: Numbers, expected: Numbers) -> None:
    """Fail with the names of what differs."""
    assert got.keys() == expected.keys()
    different = [name for name in expected if bits(got[name]) != bits(expected[name])]
    assert different == [], f"{len(different)} of {len(expected)} differ: {different[:8]}"


def assert_same_history(got: Sequence[Numbers], expected: Sequence[Numbers]) -> None:
    """As `assert_same_bits`, step by step."""
    assert len(got) == len(expected)
    for step, (now, then) in enumerate(zip(got, expected, strict=True)):
        try:
            assert_same_bits(now, then)
        except AssertionError as error:
            raise AssertionError(f"step {step}: {error}") from None


def gradients(model: nn.Module) -> Numbers:
    named = model.named_parameters()
    return {f"grad {name}": p.grad.clone() for name, p in named if p.grad is not None}


def weights(model: nn.Module) -> Numbers:
    """Copies of parameters and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def backward_history(
    model: nn.Module,
    loss_of: Callable[[int], torch.Tensor],
    steps: int = 3,
    between: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> list[Numbers]:
    """Loss and gradients of a few steps of plain gradient descent.

    Random numbers are seeded before each forward pass, which is that of `loss_of`. `between` is
    called before backward, and `after` before the gradients are read.
    """
    history = []
    for step in range(steps):
        torch.manual_seed(1000 + step)
        loss = loss_of(step)
        between()
        loss.backward()
        after()
        history.append({"loss": loss.detach().clone(), **gradients(model)})
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        del loss
    history.append(weights(model))
    return history


def saved_storages(
    run: Callable[[], Any], keep_out: Iterable[torch.Tensor] = ()
) -> list[torch.UntypedStorage]:
    """The storages that autograd saves, each once, seen with hooks of torch's own.

    Args:
        run: the forward pass.
        keep_out: tensors whose storages do not count.
    """
    excluded = {tensor.untyped_storage()._cdata for tensor in keep_out}
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            seen[storage._cdata] = storage  # held, so that no address is used twice
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return list(seen.values())
