"""Activations kept, recomputed, or offloaded: throughput and peak memory.

    python -m benchmarks.activations --dir /mnt/nvme0          the table, the plot, sweep and plans
    python -m benchmarks.activations --quick                   tiny models: to see that it runs
    python -m benchmarks.activations --lines sweep             budget: auto on a slow path (root)
    python -m benchmarks.activations --lines planned           plans for a limit of memory (root)

Every contender trains in its own process; they take turns, step by step. Keep and offload to
disk, whose speeds are to be told apart by a few percent, do so in several processes one after the
other: where its memory comes to lie makes a process faster or slower for all of its life. The
activation peak of a step is the kernel's high-water mark of resident memory, reset before the step,
above the level before it with gradients already allocated and without our idle buffers. The exit
status is 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.activations.contenders import MEANING
from benchmarks.activations.curve import curve, markdown, plot
from benchmarks.activations.models import HUNDRED_MILLION, MODELS, THIRTY_MILLION, TINY
from benchmarks.activations.planned import planned
from benchmarks.activations.session import Setting
from benchmarks.activations.sweep import sweep
from benchmarks.io.results import Result, Skipped, conclude
from benchmarks.machine import allocator, describe_machine, say, tidy_up_when_ended

_LINES = ("curve", "sweep", "planned")
#: A plan for a limit of memory is compared on these.
_PLANNED, _PLANNED_BATCH = ("GPT", "T5", "UNet"), 4


def main() -> int:
    """Parse the options, run, print and write the outcome."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.activations", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--lines", nargs="+", choices=_LINES, default=_LINES)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["GPT", "BERT"])
    parser.add_argument("--planned", nargs="+", choices=MODELS, default=_PLANNED)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=5, help="steps of each that count")
    parser.add_argument(
        "--processes", type=int, default=4, help="of keep and offload to disk, one after the other"
    )
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("--plot", type=Path, default=Path("activations.svg"))
    parser.add_argument("--quick", action="store_true", help="tiny models; figures mean little")
    options = parser.parse_args()
    tidy_up_when_ended()

    machine = {**describe_machine(options.dir), "allocator": allocator()}
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    setting = Setting(TINY if options.quick else HUNDRED_MILLION)
    results: list[Result] = []
    outcome: dict[str, object] = {
        name: getattr(options, name) for name in ("repeats", "processes", "quick")
    }
    if "curve" in options.lines:
        points, claims = curve(
            options.dir,
            options.batches,
            options.repeats,
            setting,
            models=options.models,
            processes=options.processes,
        )
        results += claims
        outcome["points"] = [asdict(point) for point in points]
        outcome["texts"] = {"": markdown(points)}
        print("\n" + "\n".join(f"{kind}: {what}" for kind, what in MEANING.items()))
        print("losses and gradients are keep's to the last bit\n\n" + markdown(points))
        plot(points, options.plot)
        print(f"\nplot: {options.plot}", flush=True)
    if "sweep" in options.lines:
        try:
            text, claims = sweep(options.dir, options.batches[0], options.repeats, setting)
            results += claims
            outcome["sweep"] = text
            print("\nbudget, on a path of 200 MB/s in each direction: " + text)
        except Skipped as why:
            say(f"skipped: sweep: {why}")
            outcome["skipped"] = {"sweep": str(why)}
    small = Setting(TINY if options.quick else THIRTY_MILLION)
    for kind in options.planned if "planned" in options.lines else ():
        try:
            text, claims = planned(options.dir, kind, _PLANNED_BATCH, options.repeats, small)
            results += claims
            outcome[f"planned {kind}"] = text
            print(f"\nplanned, {kind}, on a path of 150 MB/s: {text}", flush=True)
        except Skipped as why:
            say(f"skipped: planned: {why}")
    return conclude(results, options.json, machine, outcome)


if __name__ == "__main__":
    sys.exit(main())
