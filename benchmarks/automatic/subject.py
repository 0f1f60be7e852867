"""One training in its own process: plain, or with what `OffloadEngine` does by itself.

Prints the figures of each step as a line of JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import torch

from benchmarks.machine import forget_peak, status_bytes
from benchmarks.optimizer.contenders import ADAMW
from benchmarks.optimizer.tasks import SHAPES, RandomTokens


def main() -> None:
    """Train; options are JSON: model, steps, threads, and a config (null for plain PyTorch)."""
    options = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options["threads"])
    task = RandomTokens(SHAPES[options["model"]])
    model = task.model()
    own = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine: Any = None
    optimizer: torch.optim.Optimizer = own
    if options["config"] is not None:
        from offload_strategy import OffloadEngine

        engine = OffloadEngine(options["config"])
        optimizer = engine.attach(model, own)
    forget_peak()
    for number in range(options["steps"]):
        inputs = task.inputs(number)
        begin = time.perf_counter()
        loss = task.loss(model, inputs)
        loss.backward()
        if options["clip"] is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options["clip"])
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        figures = {
            "seconds": seconds,
            "loss": float(loss.detach()).hex(),
            "peak_bytes": status_bytes("VmHWM"),
        }
        print(json.dumps(figures), flush=True)
        del loss
    if engine is not None:
        engine.close()


if __name__ == "__main__":
    main()
