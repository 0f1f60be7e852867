"""Process entry: a tiny GPT that saves itself every few steps and may be killed at any moment.

Goes on from the checkpoint in its folder, if there is one. Prints the number of each step as it
begins, and a line of JSON when it has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.gpt import GPT, VOCABULARY, GPTConfig, nats_per_byte
from offload_strategy import OffloadEngine, load, save

#: Large enough for states that go to files, small enough for some hundred steps in seconds.
SHAPE = GPTConfig(layers=2, width=128, heads=4, context=32)
CHECKPOINT = "last.ckpt"


@dataclass(frozen=True)
class Job:
    """What a process shall do.

    Args:
        folder: where the checkpoint lies.
        tier: directory of the ssd tier.
        steps: in all, those before the checkpoint included.
        every: steps between two checkpoints; 0 for none.
        overlap: `optimizer.overlap`; empty for the plain optimizer.
    """

    folder: str
    tier: str
    steps: int = 200
    every: int = 5
    overlap: str = "commit"


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    logging.getLogger("offload_strategy").setLevel(logging.WARNING)
    print(json.dumps(train(Job(**json.loads(sys.argv[1])))), flush=True)


def train(job: Job) -> dict[str, Any]:
    """Train from the last checkpoint to the end.

    Returns:
        the step that it began with, seconds, and a digest of the parameters at the end.
    """
    torch.manual_seed(0)
    model = GPT(SHAPE)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    file = Path(job.folder, CHECKPOINT)
    begin = 0
    with _offloading(job, model, plain) as optimizer:
        if file.exists():
            checkpoint = load(file)
            begin = checkpoint["step"]
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            del checkpoint
        start = time.perf_counter()
        for step in range(begin, job.steps):
            print(step, flush=True)
            tokens = batch(step)
            nats_per_byte(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if job.every and (step + 1) % job.every == 0:
                checkpoint = {
                    "step": step + 1,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                save(checkpoint, file)
                del checkpoint
        seconds = time.perf_counter() - start
    return {"begin": begin, "seconds": seconds, "digest": digest(model)}


@contextlib.contextmanager
def _offloading(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[torch.optim.Optimizer]:
    if not job.overlap:
        yield optimizer
        return
    config = {
        "tiers": [{"name": "disk", "kind": "ssd", "path": job.tier, "capacity": "1GiB"}],
        "optimizer": {"overlap": job.overlap, "subgroup_size": 100_000},
        "memory": {"pinned": "64MiB"},
    }
    with OffloadEngine(config) as engine:
        yield engine.attach(model, optimizer)


def batch(step: int) -> torch.Tensor:
    """The bytes of a step: they depend on nothing but its number."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (2, SHAPE.context + 1), generator=generator)


def digest(model: nn.Module) -> str:
    """Of every parameter, to the last bit."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().view(torch.uint8).numpy())
    return found.hexdigest()


if __name__ == "__main__":
    main()
