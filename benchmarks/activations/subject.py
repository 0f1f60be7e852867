"""One contender in its own process: trains a step whenever it is told to.

Reads a line of JSON per request from standard input, writes one per answer. A step is a forward and
a backward pass; gradients are allocated and set to zero before it, outside of what is timed.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.activations.contenders import Contender, prepare, scratch
from benchmarks.activations.meters import MemoryMeter, meter
from benchmarks.activations.models import Shape, batch, build
from benchmarks.machine import fix_allocator
from benchmarks.turns import answers, requests


def main() -> None:
    """Answer requests until the input ends."""
    options = json.loads(sys.argv[1])
    fix_allocator()
    with answers() as answer, scratch(Path(options["dir"])) as directory:
        _train(options, Path(directory), answer)


def _train(
    options: dict[str, Any], directory: Path, answer: Callable[[dict[str, Any]], None]
) -> None:
    torch.set_num_threads(options["threads"])
    device, shape = options["device"], Shape(**options["shape"])
    if device != "cpu":  # some kernels of devices add in any order, which differs from run to run
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    model = build(options["model"], shape, device)
    measured = meter(device)
    sections: dict[str, dict[str, Any]] = {
        key: options[key] for key in ("activations", "memory", "planning") if key in options
    }
    contender = prepare(options["contender"], model, directory, sections, options["host_capacity"])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for number, request in enumerate(requests()):
        # In its own first turn: with others, the plan would assume less bandwidth.
        for early in range(0 if number else options.get("settle", 0)):
            _step(model, contender, batch(options["batch"], early, shape, device), measured)
        inputs = batch(options["batch"], number, shape, device)
        figures = _step(model, contender, inputs, measured)
        if request.get("digest"):
            figures["gradients"] = _digest(model)
        answer(figures)
    if contender.engine is not None:
        contender.engine.close()


def _step(
    model: Any, contender: Contender, inputs: dict[str, torch.Tensor], measured: MemoryMeter
) -> dict[str, Any]:
    model.zero_grad(set_to_none=False)
    gc.collect()
    before = contender.engine.metrics() if contender.engine is not None else {}
    measured.begin(int(before.get("offload/memory/pinned_bytes", 0)))
    start = time.perf_counter()
    with contender.around():
        loss = model(**inputs).loss
    middle = time.perf_counter()
    loss.backward()
    measured.wait()
    end = time.perf_counter()
    peak = measured.peak()
    answer = {
        "seconds": end - start,
        "forward_seconds": middle - start,
        "backward_seconds": end - middle,
        "peak_bytes": peak,
        "process_peak_bytes": measured.whole(),
        "loss": loss.item().hex(),
    }
    del loss
    os.sync()  # what one contender left in the page cache must not slow the next one down
    if contender.engine is not None:
        after = contender.engine.metrics()
        answer["metrics"] = {
            key: after[key] - before[key] for key in after if key.startswith(_SUMS)
        }
        answer["hidden_share"] = after["offload/transfer/hidden_share"]
        answer["pool_peak_bytes"] = after["offload/memory/pinned_peak_bytes"]
        answer["figures"] = {k: v for k, v in after.items() if k.startswith("offload/activations")}
    return answer


_SUMS = ("offload/activations/", "offload/transfer/busy")


def _digest(model: Any) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.grad.cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
