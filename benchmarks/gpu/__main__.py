"""Activations on a GPU: kept, computed again, or moved to the host or a disk.

    python -m benchmarks.gpu --dir /mnt/nvme0 --json docs/results/gpu.json

GPT, BERT and T5 as wide as the smallest of SSDTrain's evaluation (table III: hidden size 8192, four
layers, sequence 1024), in bfloat16. Every contender trains in a process of its own; they take
turns, step by step; losses and gradients must be the same to the last bit (but for recompute). The
activation peak is what the caching allocator handed out above the level before the step, with
gradients allocated.

`budget: auto` moves as much as the path takes without training waiting for it. Where that is less
than everything, the table says which bandwidth moving everything would need (SSDTrain, section
III-D: activation bytes over half of a step's time, in each direction).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.activations.contenders import (
    KEEP,
    MEANING,
    OFFLOAD_DISK,
    OFFLOAD_HOST,
    RECOMPUTE,
)
from benchmarks.activations.curve import beside, curve, markdown, plot
from benchmarks.activations.models import MODELS, TINY, Shape
from benchmarks.activations.session import Rows, Setting
from benchmarks.io.results import Result, table, write_json
from benchmarks.machine import describe_machine

_CONTENDERS = (KEEP, RECOMPUTE, OFFLOAD_DISK, OFFLOAD_HOST)
_SHAPE = Shape(width=8192, layers=4, heads=64, sequence=1024, dtype="bfloat16")
#: What the paper reaches, and more: nobody notices, and 28 to 47 % less.
_THROUGHPUT, _PEAK = 0.99, 0.53
_SAVED = "offload/activations/step_saved_bytes"


def main() -> int:
    """Parse the options, run, print and write the outcome."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--batches", type=int, nargs="+", default=[16])
    parser.add_argument("--repeats", type=int, default=10, help="steps of each that count")
    parser.add_argument("--host", default="48GiB", help="capacity of the dram tier")
    parser.add_argument("--pinned", default="16GiB", help="pinned buffers of each engine")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("--plot", type=Path, default=Path("activations-gpu.svg"))
    parser.add_argument("--quick", action="store_true", help="tiny models; figures mean little")
    parser.add_argument("--device", default="cuda", help="cpu to see that everything runs")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.accelerator.is_available():
        print("there is no accelerator that torch can use", file=sys.stderr)
        return 2

    setting = Setting(
        shape=TINY if options.quick else _SHAPE,
        device=options.device,
        host_capacity=options.host,
        memory={"pinned": options.pinned},
    )
    machine = describe_machine(options.dir)
    if options.device == "cuda":
        machine["GPU"] = torch.cuda.get_device_name()
        machine["CUDA"] = torch.version.cuda
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    points, results = curve(
        options.dir,
        options.batches,
        options.repeats,
        setting,
        models=options.models,
        contenders=_CONTENDERS,
        claims=_on_a_device,
    )
    print("\n" + "\n".join(f"{kind}: {MEANING[kind]}" for kind in _CONTENDERS))
    print("losses and gradients are keep's to the last bit\n\n" + markdown(points))
    plot(points, options.plot)
    print("\n" + table(results))
    if options.json is not None:
        outcome = {
            "repeats": options.repeats,
            "setting": asdict(setting),
            "points": [asdict(point) for point in points],
            "results": [result.as_dict() for result in results],
        }
        write_json(options.json, machine, outcome)
    return int(any(result.judged and not result.held for result in results))


def _on_a_device(
    where: str, batch: int, rows: dict[str, Rows], batches: Sequence[int]
) -> list[Result]:
    """What must hold where the host is idle: nobody notices, and half of the memory is free."""
    keep = rows[KEEP]
    results = []
    for kind in (OFFLOAD_DISK, OFFLOAD_HOST):
        ours = rows[kind]
        at = f"{where}: {kind}"
        saved = ours.steps[-1]["figures"][_SAVED]
        left = ours.steps[-1]["figures"]["offload/activations/step_left_bytes"]
        half = keep.median("seconds") / 2
        results += [
            beside(f"{at}: speed beside keep", "seconds", ours, keep, _THROUGHPUT),
            beside(f"{at}: activation peak beside keep", "peak_bytes", ours, keep, _PEAK),
            Result(
                f"{at}: moved each way, beside what moving all would need",
                left / half / 1e9, saved / half / 1e9, "GB/s", left / saved if saved else 1.0,
                0.0, judged=False,
            ),
        ]  # fmt: skip
    return results


if __name__ == "__main__":
    sys.exit(main())
