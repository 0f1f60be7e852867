"""A rank that trains data-parallel, a few steps at a time, and tells what it moved."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from offload_strategy.units import MiB

#: Nothing was moved for so long: nothing will be.
_LONGEST_TURN_SECONDS = 1.5

#: Of all ranks: less than what a step writes, so that nothing can wait for ever.
_MEMORY_BYTES = 160 * MiB

Actions = dict[str, Callable[..., dict[str, Any]]]


@contextlib.contextmanager
def data_parallel(
    rank: int, size: int, store: str, directory: str, width: int, layers: int, capacity: int
) -> Iterator[Actions]:
    """Actions of one rank: `start`, which waits for the others, and then `train`.

    Args:
        rank: of this process.
        size: ranks in all.
        store: a file by which they find each other.
        directory: of the ssd tier.
        width: of the model's square layers.
        layers: their number.
        capacity: bytes of the tier, for all ranks together.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from offload_strategy import OffloadEngine

    torch.set_num_threads(1)
    with contextlib.ExitStack() as undo:
        made: dict[str, Any] = {}

        def start() -> dict[str, Any]:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size
            )
            undo.callback(dist.destroy_process_group)
            torch.manual_seed(0)
            net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            model = DistributedDataParallel(net)
            config = {
                "tiers": [{"name": "path", "kind": "ssd", "path": directory, "capacity": capacity}],
                "mode": "always",
                "activations": {"enabled": False},
                "memory": {"pinned": _MEMORY_BYTES // size},
            }
            engine = undo.enter_context(OffloadEngine(config, processes=size))
            made["engine"] = engine
            made["model"] = model
            made["optimizer"] = engine.attach(
                model, torch.optim.AdamW(net.parameters(), fused=True)
            )
            return train(2)  # the first one makes the states, and reads none

        def train(steps: int) -> dict[str, Any]:
            """Train; when the first and the last step were over, and moves: bytes, begun, done."""
            engine, model, optimizer = made["engine"], made["model"], made["optimizer"]
            dist.barrier()
            begin = time.perf_counter()
            ends = []
            for _ in range(steps):
                model(torch.ones(1, width)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                ends.append(time.perf_counter())
            _settled(engine)
            dist.barrier()
            moves = [
                (move.direction, move.nbytes, move.started_at, move.finished_at)
                for move in list(engine._recorder.moves)
                if move.queued_at >= begin
            ]
            return {"first_step_over": ends[0], "over": ends[-1], "moves": moves}

        yield {"start": start, "train": lambda steps: train(steps)}


def _settled(engine: Any) -> None:
    """Wait for what is written behind the last step."""
    moves = -1
    while moves != len(engine._recorder.moves):
        moves = len(engine._recorder.moves)
        time.sleep(_LONGEST_TURN_SECONDS)
