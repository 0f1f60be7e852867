"""One contender in its own process, which trains some steps per request.

A request is `{"steps": n}`, and optionally a `"clip"`: the steps follow each other at once, so each
but the first finds what the one before has left to be written, as in any training. After the last
one the disk is waited for: the next contender must not pay for it.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.activations.contenders import scratch
from benchmarks.allocators import Allocator
from benchmarks.machine import forget_peak, status_bytes
from benchmarks.optimizer.contenders import Trainer, make
from benchmarks.optimizer.deepspeed_peer import Unavailable
from benchmarks.optimizer.tasks import Task, from_options
from benchmarks.turns import CANNOT, answers, requests

#: Figures of the engine that add up, reported for each step.
_SUMS = ("offload/optimizer/", "offload/activations/", "offload/transfer/busy")
#: The disk is quiet when nothing was moved for this long.
_QUIET_SECONDS = 0.25
_MOST_SECONDS = 120.0


def main() -> None:
    """Answer requests until the input ends."""
    options = json.loads(sys.argv[1])
    Allocator(options["allocator"]).begin()
    torch.set_num_threads(options["threads"])
    with answers() as answer, scratch(Path(options["dir"])) as directory:
        task = from_options(options["task"])
        try:
            trainer = make(options, task, Path(directory))
        except Unavailable as why:
            answer({CANNOT: str(why)})
            return
        parameters = sum(parameter.numel() for parameter in trainer.forward.parameters())
        answer({"parameters": parameters})
        number = 0
        for request in requests():
            gc.collect()
            steps = []
            for _ in range(request["steps"]):
                steps.append(_step(trainer, task, number, request.get("clip")))
                number += 1
            _await_disk()
            answer({"steps": steps})
        trainer.close()


def _step(trainer: Trainer, task: Task, number: int, limit: float | None) -> dict[str, Any]:
    inputs = task.inputs(number)
    metrics, moved = trainer.metrics(), _moved()
    forget_peak()
    start, used = time.perf_counter(), time.process_time()
    loss = task.loss(trainer.forward, inputs)
    computed = time.perf_counter()
    trainer.backward(loss)
    differentiated = time.perf_counter()
    norm = None if limit is None else trainer.clip(limit)
    trainer.step()
    stepped = time.perf_counter()
    trainer.zero_grad()
    end, used = time.perf_counter(), time.process_time() - used
    peak = status_bytes("VmHWM")
    # Pages of libraries: there is no peak of anonymous memory alone, but files hardly change.
    files = status_bytes("RssFile") + status_bytes("RssShmem")
    after, moved_after = trainer.metrics(), _moved()
    return {
        "seconds": end - start,
        "cpu_seconds": used,
        "forward_seconds": computed - start,
        "backward_seconds": differentiated - computed,
        "step_seconds": stepped - differentiated,
        "zero_grad_seconds": end - stepped,
        "peak_bytes": peak,
        "anonymous_bytes": peak - files,
        "read_bytes": moved_after["read_bytes"] - moved["read_bytes"],
        "written_bytes": moved_after["write_bytes"] - moved["write_bytes"],
        "loss": float(loss).hex(),
        "norm": norm,
        "pool_peak_bytes": after.get("offload/memory/pinned_peak_bytes", 0.0),
        **_grown(metrics, after),
    }


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {key: after[key] - before.get(key, 0.0) for key in after if key.startswith(_SUMS)}


def _moved() -> dict[str, int]:
    """Bytes that this process has had read from and written to disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def _await_disk() -> None:
    deadline = time.monotonic() + _MOST_SECONDS
    before = _moved()
    while time.monotonic() < deadline:
        time.sleep(_QUIET_SECONDS)
        now = _moved()
        if (now["read_bytes"], now["write_bytes"]) == (before["read_bytes"], before["write_bytes"]):
            return
        before = now


if __name__ == "__main__":
    main()
