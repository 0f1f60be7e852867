"""One training run in its own process.

    python -m benchmarks.parameters.subject JSON    (started by `running.run`)

Prints a line of JSON for the start, one for each step, and one for the end.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpt import GPT
from benchmarks.machine import fix_allocator
from benchmarks.parameters.job import Job
from offload_strategy import OffloadEngine

_CLIENTS = ("activations", "optimizer", "parameters")


def run(job: Job) -> Iterator[dict[str, Any]]:
    """Train; what happened, event by event."""
    fix_allocator()
    torch.manual_seed(0)
    begin = time.perf_counter()
    engine = None if job.directory is None else OffloadEngine(job.config())
    with nullcontext() if engine is None else engine.building():
        model = GPT(job.shape)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if engine is not None:
        optimizer = engine.attach(model, optimizer)
    count = sum(p.numel() for p in model.parameters())
    yield {"event": "start", "seconds": time.perf_counter() - begin, "parameters": count}
    tokens = job.tokens()
    before = moved(engine)
    for step in range(job.steps):
        begin = time.perf_counter()
        cpu = cpu_seconds()
        loss = model(tokens)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        now = moved(engine)
        yield {
            "event": "step",
            "step": step,
            "loss": loss.item(),
            "seconds": end - begin,
            "forward": forward - begin,
            "backward": backward - forward,
            "update": end - backward,
            "cpu_seconds": cpu_seconds() - cpu,
            **{name: now[name] - before[name] for name in now},
        }
        before = now
        del loss
    if engine is not None:
        if job.saved is not None:
            begin = time.perf_counter()
            files = engine.save_weights(model, job.saved)
            saved = sum(Path(file).stat().st_size for file in files)
            yield {"event": "saved", "seconds": time.perf_counter() - begin, "nbytes": saved}
        engine.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield {"event": "end", "peak_bytes": peak}


def moved(engine: OffloadEngine | None) -> dict[str, float]:
    """Bytes and seconds so far."""
    if engine is None:
        return {}
    metrics = engine.metrics()
    return {
        **{
            f"{verb}_bytes": sum(metrics[f"offload/{c}/{verb}_bytes"] for c in _CLIENTS)
            for verb in ("read", "written")
        },
        **{f"{c}_stall": metrics[f"offload/{c}/stall_seconds"] for c in _CLIENTS},
    }


def cpu_seconds() -> float:
    """Seconds that this process has computed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    for event in run(Job(**json.loads(sys.argv[1]))):
        print(json.dumps(event), flush=True)
