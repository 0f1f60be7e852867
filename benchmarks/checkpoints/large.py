"""Process entry: trains a large GPT, saves it, or goes on from what another process saved.

Prints a line of JSON at the end. What it is to do is one of `PHASES`.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.activations.models import Shape, batch, build
from benchmarks.checkpoints.small import digest
from benchmarks.machine import cores, fix_allocator, status_bytes
from offload_strategy import OffloadEngine, load, save

#: Train and save nothing; train all steps but the last and save; load and train the last.
PHASES = ("train", "save", "resume")


@dataclass(frozen=True)
class Job:
    """What a process shall do.

    Args:
        phase: of `PHASES`.
        file: the checkpoint.
        directory: on the disk.
        width: of a hidden state.
        layers: of the model.
        vocabulary: tokens to choose from.
        steps: in all.
        batch: sequences a step.
        sequence: tokens a sequence.
        overlap: `optimizer.overlap`.
        pinned: `memory.pinned`.
    """

    phase: str
    file: str
    directory: str
    width: int = 1024
    layers: int = 24
    vocabulary: int = 16384
    steps: int = 4
    batch: int = 2
    sequence: int = 256
    overlap: str = "commit"
    pinned: str = "4GiB"


def main() -> None:
    """Run a phase."""
    fix_allocator()
    logging.getLogger("offload_strategy").setLevel(logging.WARNING)
    torch.set_num_threads(cores())
    job = Job(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory(prefix="benchmarks-tier-", dir=job.directory) as tier:
        print(json.dumps(run(job, tier)), flush=True)


def run(job: Job, tier: str) -> dict[str, Any]:
    """Run a phase with an ssd tier in a directory."""
    shape = Shape(job.width, job.layers, max(1, job.width // 64), job.sequence, job.vocabulary)
    model = build("GPT", shape)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    config = {
        "tiers": [{"name": "disk", "kind": "ssd", "path": tier}],
        "activations": {"min_size": "256KiB", "budget": "100%"},
        "optimizer": {"overlap": job.overlap},
        "memory": {"pinned": job.pinned},
    }
    answer: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    with OffloadEngine(config) as engine:
        optimizer = engine.attach(model, plain)
        first, behind = 0, job.steps
        begin = time.perf_counter()
        if job.phase == "save":
            behind = job.steps - 1
        elif job.phase == "resume":
            first = job.steps - 1
            checkpoint = load(job.file)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            del checkpoint
            answer["load_seconds"] = time.perf_counter() - begin
        for step in range(first, behind):
            begin = time.perf_counter()
            model(**batch(job.batch, step, shape)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            answer["step_seconds"] = time.perf_counter() - begin
        if job.phase == "save":
            begin = time.perf_counter()
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            answer["state_dict_seconds"] = time.perf_counter() - begin
            save(checkpoint, job.file)
            answer["save_seconds"] = time.perf_counter() - begin
            del checkpoint
    answer["state_bytes"] = sum(2 * p.numel() * p.element_size() for p in model.parameters())
    answer["peak_rss_bytes"] = status_bytes("VmHWM")
    answer["digest"] = digest(model)
    return answer


if __name__ == "__main__":
    main()
