"""What the watch on updates costs: its seconds, and those of rehearsals, in a step.

    python -m benchmarks.optimizer.watching --dir /mnt/nvme0 [--model 70M] [--steps 8]

Both are timed within real steps; medians. See [Note: the watch] in
optimizer/user_class/side_effects.py.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.optimizer.tasks import SHAPES, TINY, RandomTokens
from offload_strategy import OffloadEngine
from offload_strategy.optimizer.user_class import inner_step
from offload_strategy.optimizer.user_class.side_effects import Watch

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "AdamW, one by one": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
}


class Stopwatch:
    """Seconds and calls of functions that are replaced by timed ones."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.perf_counter() - begin
                self.calls += 1

        return run


def measure(kind: str, overlap: str, task: RandomTokens, steps: int, directory: str) -> str:
    """Train a few steps; return a row of the table."""
    watching, rehearsing = Stopwatch(), Stopwatch()
    real = Watch.__init__, Watch.has_drawn, inner_step.rehearse
    Watch.__init__ = watching.timed(real[0])  # type: ignore[method-assign]
    Watch.has_drawn = watching.timed(real[1])  # type: ignore[method-assign]
    inner_step.rehearse = rehearsing.timed(real[2])
    tier = {"name": "disk", "kind": "ssd", "path": directory}
    config = {"tiers": [tier], "optimizer": {"overlap": overlap}, "activations": {"enabled": False}}
    taken: list[tuple[float, float, float]] = []
    try:
        with OffloadEngine(config) as engine:
            model = task.model()
            begin = time.perf_counter()
            optimizer = engine.attach(model, KINDS[kind](model.parameters()))
            attached = time.perf_counter() - begin
            for number in range(steps):
                watching.seconds = rehearsing.seconds = 0.0
                watching.calls = 0
                inputs = task.inputs(number)
                begin = time.perf_counter()
                task.loss(model, inputs).backward()
                optimizer.step()
                optimizer.zero_grad()
                taken.append((time.perf_counter() - begin, watching.seconds, rehearsing.seconds))
    finally:
        Watch.__init__, Watch.has_drawn, inner_step.rehearse = real  # type: ignore[method-assign]
    step, watch, rehearsal = (statistics.median(column) for column in zip(*taken[2:], strict=True))
    cost = f"{1e3 * watch:.2f} | {1e3 * rehearsal:.2f} | {100 * (watch + rehearsal) / step:.2f} %"
    return (
        f"| {kind} | `{overlap}` | {attached:.2f} | {step:.3f} | {watching.calls // 2} | {cost} |"
    )


def main() -> None:
    """Print the table; watching within a rehearsal is counted twice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--model", choices=[*SHAPES, "tiny"], default="70M")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    task = RandomTokens(SHAPES.get(options.model, TINY))
    print(
        "| optimizer | overlap | attach, s | step, s | updates | watch, ms | rehearsal, ms | cost |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for kind in KINDS:
        for overlap in ("commit", "eager", "off"):
            print(measure(kind, overlap, task, options.steps, options.dir), flush=True)


if __name__ == "__main__":
    main()
