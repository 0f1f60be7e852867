"""One training run in a process of its own.

    python -m benchmarks.parameters.subject JSON    (started by `table`)

Prints a line of JSON for the start, one for each step, and one for the end.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.activations.models import Shape
from benchmarks.gpt import GPT
from benchmarks.machine import fix_allocator
from offload_strategy import OffloadEngine

_CLIENTS = ("activations", "optimizer", "parameters")


@dataclass(frozen=True)
class Job:
    """What to train.

    Args:
        width: of the GPT.
        layers: likewise.
        vocabulary: likewise.
        sequence: tokens of a sequence.
        batch: sequences of a step.
        steps: of training.
        directory: of the tier; None for plain PyTorch.
        saved: where the weights go in the end; None for nowhere.
        overlap: of the optimizer.
        state_dtype: likewise.
        pinned: ``memory.pinned``.
    """

    width: int
    layers: int
    vocabulary: int = 8192
    sequence: int = 128
    batch: int = 1
    steps: int = 10
    directory: str | None = None
    saved: str | None = None
    overlap: str = "eager"
    state_dtype: str = "float32"
    pinned: str = "1GiB"

    @property
    def shape(self) -> Shape:
        """Of the model."""
        return Shape(
            width=self.width,
            layers=self.layers,
            heads=max(1, self.width // 64),
            vocabulary=self.vocabulary,
            sequence=self.sequence,
        )

    def config(self) -> dict[str, Any]:
        """Everything streamed."""
        return {
            "tiers": [{"name": "disk", "kind": "ssd", "path": self.directory}],
            "parameters": {"enabled": True},
            "optimizer": {"overlap": self.overlap, "state_dtype": self.state_dtype},
            "memory": {"pinned": self.pinned},
        }


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
    generator = torch.Generator().manual_seed(1)
    # Ever the same tokens: a falling loss then says that the updates arrive.
    tokens = torch.randint(job.vocabulary, (job.batch, job.sequence), generator=generator)
    before = _moved(engine)
    for step in range(job.steps):
        begin = time.perf_counter()
        cpu = _cpu_seconds()
        loss = model(tokens)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        now = _moved(engine)
        yield {
            "event": "step",
            "step": step,
            "loss": loss.item(),
            "seconds": end - begin,
            "forward": forward - begin,
            "backward": backward - forward,
            "update": end - backward,
            "cpu_seconds": _cpu_seconds() - cpu,
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


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _moved(engine: OffloadEngine | None) -> dict[str, float]:
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


if __name__ == "__main__":
    for event in run(Job(**json.loads(sys.argv[1]))):
        print(json.dumps(event), flush=True)
