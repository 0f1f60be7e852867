"""What ranks of `test_ranks` do: others load what they saved, with offload and without."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from offload_strategy import OffloadEngine, load, save
from tests.distributed.data_parallel_runs import Net, config, loss_of

#: Samples of a step, of all ranks together.
BATCH = 8
TOKENS = torch.randint(0, 96, (48, 17), generator=torch.Generator().manual_seed(1))


def digest(value: Any) -> str:
    """A hash of nested values, to the last bit."""
    made = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            made.update(f"{part.dtype}{tuple(part.shape)}".encode())
            made.update(part.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key in part:  # in their order, which is a part of it
                made.update(repr(key).encode())
                add(part[key])
        elif isinstance(part, list | tuple):
            made.update(repr(len(part)).encode())
            for item in part:
                add(item)
        else:
            made.update(repr(part).encode())

    add(value)
    return made.hexdigest()


@contextlib.contextmanager
def offloaded(tier: Path, offload: bool) -> Iterator[OffloadEngine | None]:
    if not offload:
        yield None
        return
    with OffloadEngine(config(tier, "commit")) as engine:
        yield engine


def loop(
    rank: int, size: int, tier: Path, offload: bool, source: Path | None, target: Path | None
) -> dict[str, Any]:
    """Plain PyTorch: three steps, from a checkpoint or to one."""
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net) if size > 1 else net
    with offloaded(tier, offload) as engine:
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
        if engine is not None:
            optimizer = engine.attach(model, optimizer)
        if source is not None:
            saved = load(source) if offload else torch.load(source)
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        losses = []
        for step in range(3):
            first = step * BATCH + rank * BATCH // size
            loss = loss_of(model, TOKENS[first : first + BATCH // size])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
        del loss
        if target is not None:
            if engine is not None:  # as code does that asks rank 0 alone
                optimizer.consolidate_state_dict()
            if rank == 0:
                saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                (save if offload else torch.save)(saved, target)
            dist.barrier()
        return {
            "losses": losses,
            "weights": digest(net.state_dict()),
            "states": digest(optimizer.state_dict()) if rank == 0 or target is None else "",
            "moved": moved({} if engine is None else engine.metrics()),
        }


def moved(metrics: dict[str, float]) -> list[float]:
    """Bytes written of activations and of states; none without offload."""
    clients = ("activations", "optimizer")
    return [metrics[f"offload/{client}/written_bytes"] for client in clients] if metrics else []


#: Whether runs offload, and whether what they begin with was saved by one that does.
FIRST, LATER = [(False, None), (True, None)], [(False, False), (False, True), (True, False)]


def all_runs(rank: int, directory: Path, later: bool) -> list[dict[str, Any]]:
    """What a rank of `test_ranks` does."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    found = []
    for offload, saved in LATER if later else FIRST:
        source = None if saved is None else directory / f"{saved}.ckpt"
        target = directory / f"{offload}.ckpt" if saved is None else None
        found.append(loop(rank, size, directory / "tier", offload, source, target))
    return found
