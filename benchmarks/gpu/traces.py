"""What a steady step does on the device, and what a saved tensor costs the thread that trains.

Tasks of `worker`. On a real device PyTorch's profiler traces a few steps: no host memory may be
registered in them, and training may wait for the device no more often than without this package.
The simulated device counts the same itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from benchmarks.activations.models import batch
from benchmarks.device_traces import read_trace
from benchmarks.gpu import device
from benchmarks.gpu.contenders import PLAIN, SAVE_ON_CPU, TRL, Job, Trainer, make, save_on_cpu, trl
from benchmarks.gpu.device import Unavailable
from benchmarks.turns import Deadline
from offload_strategy import OffloadEngine

_WARM_UP_STEPS = 6
_TRACED_STEPS = 3
_WARM_UP_PASSES, _MOST_PASSES = 3, 40


# ---------------------------------------------------------------------- steady steps
def steady(options: Mapping[str, Any]) -> dict[str, Any]:
    """What steps of a `contender` with a `job` do on the device once everything is learned."""
    job, kind, deadline = Job.of(options["job"]), options["device"], Deadline(options["seconds"])
    with TemporaryDirectory(prefix="benchmarks-gpu-", dir=options["dir"]) as directory:
        trainer = make(options["contender"], job, kind, Path(directory))
        try:
            for number in range(_WARM_UP_STEPS):
                _steps(trainer, job, kind, 1)
                torch.accelerator.synchronize()
                if deadline.left < 0:
                    told = f"{number + 1} steps took longer than {options['seconds']:.0f} s"
                    raise Unavailable(told)
            look = _simulated if kind == device.SIMULATED else _traced
            found = {"steps": _TRACED_STEPS, **look(trainer, job, kind)}
            if trainer.engine is not None:
                found["metrics"] = trainer.engine.metrics()
            return found
        finally:
            trainer.close()


def _steps(trainer: Trainer, job: Job, kind: str, steps: int) -> None:
    for number in range(steps):
        inputs = batch(job.batch, number, job.shape, kind)
        with torch.autocast(kind, torch.bfloat16, enabled=job.autocast), trainer.around():
            loss = trainer.model(**inputs).loss
        trainer.backward(loss)
        if job.updates:
            trainer.update()
        else:
            trainer.model.zero_grad()


def _simulated(trainer: Trainer, job: Job, kind: str) -> dict[str, Any]:
    module = torch.get_device_module(kind)
    module.counts(reset=True)
    _steps(trainer, job, kind, _TRACED_STEPS)
    counts, everyone = module.training_counts(), module.counts()
    copies = {
        how: sum(everyone.get(f"{how}:copy {way}", 0) for way in ("DtoH", "HtoD"))
        for how in ("async", "staged", "sync")
    }
    return {
        "waits": {n.removeprefix("sync:"): c for n, c in counts.items() if n.startswith("sync:")},
        "registrations": {n: c for n, c in everyone.items() if n.startswith("pinned:")},
        "copies": copies,
        "overlap": copies["async"] / max(1, sum(copies.values())),
    }


def _traced(trainer: Trainer, job: Job, kind: str) -> dict[str, Any]:
    wanted = getattr(torch.profiler.ProfilerActivity, kind.upper(), None)
    if wanted is None or wanted not in torch.profiler.supported_activities():
        raise Unavailable(f"PyTorch's profiler does not trace {kind} here")
    activities = [torch.profiler.ProfilerActivity.CPU, wanted]
    with torch.profiler.profile(activities=activities) as profiler:
        _steps(trainer, job, kind, _TRACED_STEPS)
        torch.accelerator.synchronize()
    with TemporaryDirectory() as place:
        file = Path(place) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return read_trace(file)


# ---------------------------------------------------------------------- a saved tensor
class _Chain(nn.Module):
    """Saves a tensor in each of many operations, which take next to no time on a device."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for _ in range(self.length):
            x = torch.sin(x)
        return x


MOVED = "ours, moved to the host"
KEPT_SMALL, KEPT_BUDGET = "ours, kept for its size", "ours, kept by the budget"
HOOKS = (PLAIN, KEPT_SMALL, KEPT_BUDGET, MOVED, TRL, SAVE_ON_CPU)
_ACTIVATIONS: dict[str, dict[str, Any]] = {
    MOVED: {"min_size": 1, "budget": "100%"},
    KEPT_SMALL: {"min_size": "1GiB"},
    KEPT_BUDGET: {"min_size": 1, "budget": "0%"},
}


#: Microseconds of a saved tensor in the threads that train: of processor time, and by the clock.
FIGURES = ("pack, cpu", "pack, clock", "unpack, cpu", "unpack, clock")


def hooks(options: Mapping[str, Any]) -> dict[str, Any]:
    """Microseconds of each of so many `tensors` of `nbytes` in the threads that train."""
    deadline = Deadline(options["seconds"])
    rows: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(HOOKS):
        limit = Deadline(deadline.left / (len(HOOKS) - number))
        try:
            rows[name] = _hooks_of(name, options, limit)
        except Unavailable as why:
            rows[name] = {"reason": str(why)}
        device.release_memory()
    plain = dict(rows[PLAIN])
    for row in rows.values():
        if "reason" not in row:
            row["added"] = {figure: row[figure] - plain[figure] for figure in FIGURES}
    return {"tensors": options["tensors"], "nbytes": options["nbytes"], "rows": rows}


def _hooks_of(name: str, options: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
    count, kind = options["tensors"], options["device"]
    model = _Chain(count).to(kind)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    passes = []
    with ExitStack() as stack:
        if name in _ACTIVATIONS:
            room = max(64 << 20, 4 * count * options["nbytes"])
            config = {
                "tiers": [{"name": "host", "kind": "dram", "capacity": room}],
                "activations": _ACTIVATIONS[name],
                "optimizer": {"enabled": False},
                "memory": {"pinned": room},
            }
            stack.enter_context(OffloadEngine(config)).attach(model)
        elif name != PLAIN:
            around = save_on_cpu if name == SAVE_ON_CPU else trl()
        x = torch.randn(options["nbytes"] // 4, device=kind)
        for _ in range(_WARM_UP_PASSES):
            _pass(model, x, around)
        while len(passes) < 2 or (deadline.left > 0 and len(passes) < _MOST_PASSES):
            passes.append(_pass(model, x, around))
    found = {}
    for figure, values in zip(FIGURES, zip(*passes, strict=True), strict=True):
        # The least of times by the clock: whatever else the machine does makes them longer.
        middle = min(values) if "clock" in figure else statistics.median(values)
        found[figure] = middle / count * 1e6
    return found


def _pass(
    model: nn.Module, x: torch.Tensor, around: Callable[[], AbstractContextManager[Any]]
) -> tuple[float, ...]:
    """Seconds of `FIGURES`; of backward between the first gradient and the last, in its thread."""
    seen: list[tuple[float, float]] = []

    def look(_: torch.Tensor | None = None) -> None:
        seen.append((time.thread_time(), time.perf_counter()))

    x = x.detach().requires_grad_()
    x.register_hook(look)
    torch.accelerator.synchronize()
    look()
    with around():
        y = model(x)
    look()
    y.register_hook(look)
    torch.accelerator.synchronize()
    y.sum().backward()
    torch.accelerator.synchronize()
    begin, end, first, last = seen
    return end[0] - begin[0], end[1] - begin[1], last[0] - first[0], last[1] - first[1]
