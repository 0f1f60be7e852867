"""A model that is saved, or loaded, in its own process.

    python -m benchmarks.parameters.loading_subject JSON    (started by `running.run`)

Prints a line of JSON for what it was asked for, and one for the losses that follow.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpt import GPT
from benchmarks.machine import fix_allocator, forget_peak, status_bytes
from benchmarks.parameters.job import Job
from benchmarks.parameters.subject import moved
from offload_strategy import OffloadEngine

#: Save; load to the tiers; load and leave the bytes in the shards.
SAVE, COPY, ADOPT = "save", "copy", "adopt"


@dataclass(frozen=True)
class LoadJob(Job):
    """What to do.

    Args:
        phase: `SAVE`, `COPY` or `ADOPT`.
        checkpoint: directory of the shards.
        train: whether a step follows.
    """

    phase: str = SAVE
    checkpoint: str = ""
    train: bool = False


def run(job: LoadJob) -> Iterator[dict[str, Any]]:
    """Do it; what happened, event by event."""
    fix_allocator()
    torch.manual_seed(0)
    with OffloadEngine(job.config()) as engine:
        yield from _save(engine, job) if job.phase == SAVE else _load(engine, job)


def _save(engine: OffloadEngine, job: LoadJob) -> Iterator[dict[str, Any]]:
    with engine.building():
        model = GPT(job.shape)
    begin = time.perf_counter()
    files = engine.save_weights(model, job.checkpoint)
    seconds = time.perf_counter() - begin
    nbytes = sum(file.stat().st_size for file in files)
    yield {"event": "saved", "seconds": seconds, "nbytes": nbytes}
    engine.attach(model)
    yield {"event": "losses", "losses": [model(job.tokens()).item()]}


def _load(engine: OffloadEngine, job: LoadJob) -> Iterator[dict[str, Any]]:
    model = job.empty()
    written = moved(engine)["written_bytes"]
    forget_peak()
    before = status_bytes("VmRSS")
    begin = time.perf_counter()
    engine.load_weights(model, job.checkpoint, adopt=job.phase == ADOPT)
    engine._resources.store.wait_for_writes()
    seconds = time.perf_counter() - begin
    yield {
        "event": "loaded",
        "seconds": seconds,
        "rise_bytes": max(0, status_bytes("VmHWM") - before),
        "written_bytes": moved(engine)["written_bytes"] - written,
    }
    if not job.train:
        return
    optimizer = engine.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    tokens = job.tokens()
    loss = model(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    # Once more, for what the step has made of weights that were nowhere but in the shards.
    yield {"event": "losses", "losses": [loss.item(), model(tokens).item()]}


if __name__ == "__main__":
    for event in run(LoadJob(**json.loads(sys.argv[1]))):
        print(json.dumps(event), flush=True)
