"""One contender of `search`: trains a GPT, a step whenever it is told to."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.activations.models import Shape
from benchmarks.gpt import GPT
from benchmarks.machine import fix_allocator, forget_peak, status_bytes
from benchmarks.turns import answers, requests
from offload_strategy import OffloadEngine


class _Checkpointed(nn.Sequential):
    """Blocks of which the first ones compute again in backward what they did in forward."""

    again = 0

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self):
            x = checkpoint(block, x, use_reentrant=False) if number < self.again else block(x)
        return x


class _Training:
    """A model and its optimizer, with an engine or without.

    Args:
        options: `shape`, `batch`, `micro_batches`, `recomputed_layers`, and `config` for the engine
            (a preset or a file), None for plain PyTorch.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._shape = Shape(**options["shape"])
        torch.manual_seed(0)
        config = options["config"]
        self.engine = None if config is None else OffloadEngine(config)
        with nullcontext() if self.engine is None else self.engine.building():
            self._model = GPT(self._shape)
        self._model.blocks.__class__ = _Checkpointed
        self._model.blocks.again = options["recomputed_layers"]
        optimizer: Any = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        if self.engine is not None:
            optimizer = self.engine.attach(self._model, optimizer)
        self._optimizer = optimizer

    def step(self, number: int) -> dict[str, Any]:
        """Train one, and tell how long it took."""
        generator = torch.Generator().manual_seed(number)
        size = (self._options["batch"], self._shape.sequence)
        tokens = torch.randint(self._shape.vocabulary, size, generator=generator)
        parts = tokens.chunk(self._options["micro_batches"])
        forget_peak()
        begin = time.perf_counter()
        total = 0.0
        for place, part in enumerate(parts):
            if self.engine is not None:
                self.engine.microbatch(place, last=place == len(parts) - 1)
            loss = self._model(part) / len(parts)
            loss.backward()
            total += loss.item()
        self._optimizer.step()
        self._optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        moved = {} if self.engine is None else self.engine.metrics()
        os.sync()  # what one contender left in the page cache must not slow the next one down
        return {
            "seconds": seconds,
            "loss": total,
            "peak_bytes": status_bytes("VmHWM"),
            "written_bytes": sum(
                value for name, value in moved.items() if name.endswith("/written_bytes")
                and "endurance" not in name
            ),
        }  # fmt: skip


def main() -> None:
    """Answer requests until the input ends."""
    options = json.loads(sys.argv[1])
    fix_allocator()
    torch.set_num_threads(options["threads"])
    with answers() as answer:
        training = _Training(options)
        for number, _ in enumerate(requests()):
            answer(training.step(number))
        if training.engine is not None:
            training.engine.close()


if __name__ == "__main__":
    main()
