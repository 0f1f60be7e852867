"""One contender trains: first steps with kernels that repeat, for their bits, then by the clock.

A task of `worker`. Steps by the clock have the kernels that everybody uses, some of which add in
any order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.activations.models import batch
from benchmarks.gpu import device
from benchmarks.gpu.contenders import Job, Trainer, make
from benchmarks.gpu.device import Unavailable
from benchmarks.machine import device_rates, forget_peak, status_bytes
from benchmarks.turns import Deadline

#: Steps whose losses and gradients are compared bit by bit; then such in which amounts and orders
#: are learned; then those that count.
_EXACT_STEPS, _WARM_UP_STEPS, _LEAST_STEPS = 3, 3, 2
#: What the engine counts from the beginning on.
_COUNTED = tuple(
    f"offload/{client}/{what}"
    for client in ("activations", "optimizer", "parameters")
    for what in ("written_bytes", "read_bytes", "forwarded_bytes", "stall_seconds")
)


def train(options: Mapping[str, Any]) -> dict[str, Any]:
    """Train the `job` with the `contender` until the time is over, or `steps` were counted."""
    deadline = Deadline(options["seconds"])
    job, kind = Job.of(options["job"]), options["device"]
    if job.limit is not None and not device.set_memory_limit(kind, job.memory_limit):
        raise Unavailable(f"{kind} has no limit of memory that can be set")
    try:
        with TemporaryDirectory(prefix="benchmarks-gpu-", dir=options["dir"]) as directory:
            trainer = make(options["contender"], job, kind, Path(directory))
            try:
                return _train(trainer, job, kind, deadline, options["steps"])
            finally:
                # Weights come back when an engine closes, and there may be no room for them.
                device.set_memory_limit(kind, None)
                trainer.close()
    finally:
        device.set_memory_limit(kind, None)


def _train(trainer: Trainer, job: Job, kind: str, deadline: Deadline, most: int) -> dict[str, Any]:
    numbers = iter(range(1 << 30))
    exact: list[dict[str, Any]] = []
    with device.repeatable(strict=True):
        while len(exact) < _EXACT_STEPS:
            exact.append(step(trainer, job, kind, next(numbers), bits=True))
            if deadline.left < 0:
                raise Unavailable(f"no time was left after {len(exact)} steps")
    for _ in range(_WARM_UP_STEPS):
        step(trainer, job, kind, next(numbers))
    steps: list[dict[str, Any]] = []
    while len(steps) < most and (len(steps) < _LEAST_STEPS or deadline.left > 0):
        steps.append(step(trainer, job, kind, next(numbers)))
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "losses": [one["loss"] for one in exact],
        "gradients": [one["gradients"] for one in exact if "gradients" in one],
        "steps": steps,
    }
    if trainer.engine is not None:
        compared = trainer.engine.report().comparison
        if compared is None:
            found["prediction"] = {"reason": "too few steps, or no activations are offloaded"}
        else:
            parts = [asdict(one) | {"ratio": one.ratio} for one in compared.parts]
            found["prediction"] = {"parts": parts}
    return found


def step(
    trainer: Trainer, job: Job, kind: str, number: int, *, bits: bool = False
) -> dict[str, Any]:
    """Train a step and measure it; with `bits` also its gradients, where they stay."""
    inputs = batch(job.batch, number, job.shape, kind)
    if not job.updates:  # gradients are in memory before it: what it adds are activations
        for parameter in trainer.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    before = {} if trainer.engine is None else trainer.engine.metrics()
    with suppress(OSError):  # some systems count no peak of a process
        forget_peak()
    torch.accelerator.synchronize()
    level = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    start = time.perf_counter()
    with torch.autocast(kind, torch.bfloat16, enabled=job.autocast), trainer.around():
        loss = trainer.model(**inputs).loss
    trainer.backward(loss)
    trainer.update()
    launched = time.perf_counter()
    torch.accelerator.synchronize()
    end = time.perf_counter()
    after = {} if trainer.engine is None else trainer.engine.metrics()
    peak = int(torch.accelerator.max_memory_allocated())
    found = {
        "seconds": end - start,
        # The host is ahead of the device: until it had asked for all of the step.
        "launch_seconds": launched - start,
        "peak_bytes": peak - level,
        "device_bytes": peak,
        "loss": loss.item().hex(),
        "saved_bytes": after.get("offload/activations/step_saved_bytes", 0.0),
        "left_bytes": after.get("offload/activations/step_left_bytes", 0.0),
        "hidden_share": after.get("offload/transfer/hidden_share", 0.0),
        **{name: after[name] - before[name] for name in _COUNTED if name in after},
    }
    with suppress(OSError):
        found["host_bytes"] = status_bytes("VmHWM")
    if bits and not job.updates:
        found["gradients"] = device.digest(trainer.model)
    return found


def rates(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the machine does at best; a task of `worker`."""
    return device_rates(options["device"], Path(options["dir"]), quick=options["quick"])


def median(found: Mapping[str, Any], figure: str) -> float:
    """Of a figure over the steps of what `train` found."""
    return float(statistics.median(one.get(figure, 0.0) for one in found["steps"]))
