"""One contender in a process of its own, on a device: trains some steps whenever it is told to.

A request is `{"steps": n}`. The first step of a turn does not count: cached device memory goes
back after every turn, as all contenders share the device.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Before CUDA is initialised: else cuBLAS may choose another algorithm from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from benchmarks.activations.contenders import scratch
from benchmarks.activations.meters import MemoryMeter, meter
from benchmarks.activations.models import batch, build
from benchmarks.gpu.contenders import Trainer, make
from benchmarks.gpu.job import Job
from benchmarks.gpu.peers import Unavailable
from benchmarks.machine import fix_allocator, forget_peak, status_bytes
from benchmarks.turns import CANNOT, answers, requests

#: Why a contender cannot go on, where that is a result.
OUT_OF_MEMORY = "out of memory"


def main() -> None:
    """Answer requests until the input ends."""
    options = json.loads(sys.argv[1])
    fix_allocator()
    job = Job.of(options["job"])
    if job.device != "cpu":  # some kernels add in any order, which differs from run to run
        torch.use_deterministic_algorithms(True, warn_only=True)
    with answers() as answer, scratch(Path(options["dir"])) as directory:
        try:
            trainer = make(
                options["contender"],
                job,
                lambda: build(job.model, job.shape, job.device),
                Path(directory),
            )
        except Unavailable as why:
            answer({CANNOT: str(why)})
            return
        except torch.OutOfMemoryError:
            answer({CANNOT: OUT_OF_MEMORY})
            return
        answer({"parameters": sum(p.numel() for p in trainer.model.parameters())})
        measured = meter(job.device)
        number = 0
        for request in requests():
            gc.collect()
            steps = []
            try:
                for _ in range(request["steps"]):
                    steps.append(_step(trainer, job, number, measured))
                    number += 1
            except torch.OutOfMemoryError:
                answer({CANNOT: OUT_OF_MEMORY})
                return
            if job.device != "cpu":
                torch.accelerator.empty_cache()
            answer({"steps": steps[1:] or steps})
        trainer.close()


def _step(trainer: Trainer, job: Job, number: int, measured: MemoryMeter) -> dict[str, Any]:
    inputs = batch(job.batch, number, job.shape, job.device)
    if not job.updates:
        _no_gradients(trainer)
    before = {} if trainer.engine is None else trainer.engine.metrics()
    forget_peak()
    measured.begin(int(before.get("offload/memory/pinned_bytes", 0)))
    start = time.perf_counter()
    with (
        torch.autocast(job.device, torch.bfloat16, enabled=job.autocast),
        trainer.around(),
    ):
        loss = trainer.model(**inputs).loss
    computed = time.perf_counter()
    trainer.backward(loss)
    differentiated = time.perf_counter()
    trainer.update()
    measured.wait()
    end = time.perf_counter()
    after = {} if trainer.engine is None else trainer.engine.metrics()
    sums = ("offload/activations/", "offload/optimizer/", "offload/parameters/")
    return {
        "seconds": end - start,
        "forward_seconds": computed - start,
        "backward_seconds": differentiated - computed,
        "update_seconds": end - differentiated,
        "peak_bytes": measured.peak(),
        "device_bytes": measured.whole(),
        "host_bytes": status_bytes("VmHWM"),
        "loss": float(loss).hex(),
        "gradients": None if job.updates else _digest(trainer),
        "saved_bytes": after.get("offload/activations/step_saved_bytes", 0.0),
        "left_bytes": after.get("offload/activations/step_left_bytes", 0.0),
        **{k: v - before.get(k, 0.0) for k, v in after.items() if k.startswith(sums)},
    }


def _no_gradients(trainer: Trainer) -> None:
    """Zeros, in memory before the step begins: what the step adds to that are activations."""
    for parameter in trainer.model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


def _digest(trainer: Trainer) -> str:
    """Of sums of the gradients' bits, taken where they are; a few numbers for each."""
    sums = []
    for parameter in trainer.model.parameters():
        assert parameter.grad is not None
        bits = parameter.grad.detach().contiguous().flatten().view(torch.uint8)
        even = bits.numel() // 4 * 4
        words = bits[:even].view(torch.int32)
        sums += [words.sum(dtype=torch.int64), words[::7].sum(dtype=torch.int64)]
    values = torch.stack(sums).cpu()
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
