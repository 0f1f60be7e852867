"""The largest model, and the longest context, that train under a cap of device memory.

    python -m benchmarks.gpu.limits '{"device": "cuda", "dir": "/tmp", ...}'   (see `reach`)

A process tries sizes that grow by a half, two steps each, until one runs out of device memory, and
prints a line of JSON for each. On the CPU nothing caps memory: it tries one size.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.activations.models import Shape, batch, build
from benchmarks.gpu import contenders as who
from benchmarks.gpu.contenders import make
from benchmarks.gpu.job import Job
from benchmarks.io.results import Result
from benchmarks.machine import say
from offload_strategy.units import GiB

#: Blocks of the first model that is tried, and tokens of the first sequence.
_FIRST = {"layers": 8, "sequence": 2048}
_GROWTH = 1.5
_SHAPE = Shape(width=2048, layers=8, heads=16, sequence=512, vocabulary=32000, dtype="bfloat16",
               tied=False)  # fmt: skip
_CAP = 8 * GiB
_EVERYTHING = "ours: everything"


def reach(
    directory: Path, seconds: float, *, device: str, quick: bool
) -> tuple[dict[str, str], list[Result]]:
    """How far plain training and ours come.

    Args:
        directory: on the disk.
        seconds: for all of it.
        device: type of it.
        quick: one small size.
    """
    pairs = [(what, name) for what in _FIRST for name in (who.PLAIN, _EVERYTHING)]
    far: dict[tuple[str, str], float] = {}
    rows = [
        "| | contender | largest that trained | parameters | s a step |",
        "|---|---|---|---|---|",
    ]
    end = time.monotonic() + seconds
    for number, (what, name) in enumerate(pairs):
        say(f"longest {what}: {name}")
        share = (end - time.monotonic()) / (len(pairs) - number)
        options = {
            "what": what, "name": name, "device": device, "dir": str(directory), "quick": quick,
        }  # fmt: skip
        tries = _tries(options, share)
        done = [one for one in tries if one["trained"]]
        far[what, name] = done[-1]["size"] if done else 0.0
        last = done[-1] if done else {"parameters": 0, "seconds": 0.0}
        stopped = "" if tries and not tries[-1]["trained"] else " or more"
        rows.append(
            f"| {what} | {name} | {far[what, name]:.0f}{stopped} "
            f"| {last['parameters'] / 1e6:,.0f}M | {last['seconds']:.2f} |"
        )
    results = []
    for what in _FIRST:
        ours, plain = far[what, _EVERYTHING], far[what, who.PLAIN]
        ratio = ours / plain if plain else float(ours > 0)
        name = f"{what} under {_CAP / GiB:.0f} GiB of device memory"
        results.append(Result(name, ours, plain, what, ratio, 1.5, judged=not quick))
    title = f"What trains under {_CAP / GiB:.0f} GiB of device memory"
    return {title: "\n".join(rows)}, results


def _tries(options: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.limits", json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    watch = threading.Timer(max(1.0, seconds), process.kill)
    watch.start()
    try:
        assert process.stdout is not None
        return [json.loads(line) for line in process.stdout if line.startswith("{")]
    finally:
        watch.cancel()
        process.kill()
        process.wait()


def main() -> None:
    """Try sizes until one does not train."""
    options = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    device = options["device"]
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(_CAP / total)
    size = float(_FIRST[options["what"]]) if not options["quick"] else 2.0
    while True:
        shape = replace(_SHAPE, **{options["what"]: int(size)})
        if options["quick"]:
            shape = replace(shape, width=64, heads=2, vocabulary=512, sequence=64, layers=2)
        job = Job("GPT", shape, 1, device, updates=True, host="48GiB")
        tried = _try(options["name"], replace(job, pinned="256MiB") if device == "cpu" else job,
                     Path(options["dir"]))  # fmt: skip
        print(json.dumps({"size": int(size), **tried}), file=out, flush=True)
        if not tried["trained"] or options["quick"]:
            return
        size *= _GROWTH


def _try(name: str, job: Job, directory: Path) -> dict[str, Any]:
    begin, parameters, trained = time.perf_counter(), 0, False
    with tempfile.TemporaryDirectory(prefix="benchmarks-gpu-", dir=directory) as place:
        trainer = None
        try:
            trainer = make(name, job, lambda: build("GPT", job.shape, job.device), Path(place))
            parameters = sum(p.numel() for p in trainer.model.parameters())
            for number in range(2):
                begin = time.perf_counter()
                inputs = batch(job.batch, number, job.shape, job.device)
                loss = trainer.model(**inputs).loss
                trainer.backward(loss)
                trainer.update()
                float(loss)
                del loss
            trained = True
        except torch.OutOfMemoryError:
            pass
        seconds = time.perf_counter() - begin
        if trainer is not None and trainer.engine is not None:
            # Weights come back when it closes, and there may be no room for them.
            with _uncapped(job.device):
                trainer.close()
        del trainer
        gc.collect()
        if job.device != "cpu":
            torch.accelerator.empty_cache()
    return {"trained": trained, "parameters": parameters, "seconds": seconds}


@contextmanager
def _uncapped(device: str) -> Iterator[None]:
    if device != "cuda":
        yield
        return
    torch.cuda.set_per_process_memory_fraction(1.0)
    yield
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(_CAP / total)


if __name__ == "__main__":
    main()
