"""One configuration in its own process: profiled on a free path, then trained on a slow one.

It answers two requests, in this order: `profile` (with the file to write it to) and `train`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.activations.models import Shape, batch, build
from benchmarks.machine import fix_allocator, forget_peak, status_bytes
from benchmarks.turns import answers, requests
from offload_strategy import OffloadEngine
from offload_strategy.plan_runtime.profile import Profile

#: Steps with a profile, and of how many of the last the middle one counts: some step is disturbed.
_PROFILED, _OF = 8, 5
#: Steps until a plan for a limit has settled.
_SETTLED = 12


class _Training:
    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._shape = Shape(**options["shape"])
        self._model = build(options["model"], self._shape)
        self._optimizer: Any = None

    def engine(self, device_memory: int | str) -> OffloadEngine:
        """A new one, and a new optimizer."""
        options = self._options
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        engine = OffloadEngine(
            {
                "tiers": [{"name": "path", "kind": "ssd", "path": options["dir"]}],
                "mode": "always",
                "optimizer": {
                    "enabled": options["overlap"] is not None,
                    "overlap": options["overlap"] or "off",
                },
                "planning": {"device_memory": device_memory},
                "memory": {"pinned": "512MiB"},
            }
        )
        plain = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._optimizer = engine.attach(self._model, plain)
        return engine

    def step(self, number: int) -> tuple[float, int]:
        """Seconds, and the peak of the process."""
        inputs = batch(self._options["batch"], number, self._shape)
        forget_peak()
        begin = time.perf_counter()
        self._model(**inputs).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - begin, status_bytes("VmHWM")


def _typical(profiles: Sequence[Profile]) -> Profile:
    def seconds(profile: Profile) -> float:
        return profile.step_seconds + sum(update.seconds for update in profile.updates)

    return sorted(profiles, key=seconds)[len(profiles) // 2]


def main() -> None:
    """Answer the requests."""
    options = json.loads(sys.argv[1])
    fix_allocator()
    torch.set_num_threads(options["threads"])
    training = _Training(options)
    with answers() as answer:
        asked = requests()
        file = Path(next(asked)["file"])
        with training.engine("auto") as engine:
            profiles = []
            for number in range(_PROFILED):
                training.step(number)
                profiles.append(engine.profile())
            _typical(profiles[-_OF:]).save(file)
        answer({})
        limit = next(asked)["device_memory"]
        with training.engine(limit) as engine:
            for number in range(_SETTLED):
                training.step(number)
            steps = [training.step(number) for number in range(options["steps"])]
            moved = engine.metrics()
        answer(
            {
                "seconds": statistics.median(seconds for seconds, _ in steps),
                "each": [seconds for seconds, _ in steps],
                "peak_bytes": statistics.median(peak for _, peak in steps),
                "left_bytes": moved["offload/activations/step_left_bytes"],
                "saved_bytes": moved["offload/activations/step_saved_bytes"],
            }
        )


if __name__ == "__main__":
    main()
