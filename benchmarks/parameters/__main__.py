"""Training a GPT whose weights, gradients and states are several times its memory.

    python -m benchmarks.parameters [--dir DIR] [--limit 4GiB] [--width 2048] [--layers 26] ...

In a memory group of that limit: plain PyTorch, which the system kills, and the same script with
everything streamed, from its start to saved safetensors. Each runs in a process of its own.

What a step takes at least is the longer of two: computing alone, and moving its bytes at the path's
measured bandwidth (read bytes over what it reads, plus written bytes over what it writes). The
model does not fit for the former, so plain PyTorch trains two with fewer of its layers, outside of
the group, and their difference counts for each of the other layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.memory_group import memory_group, why_not
from benchmarks.parameters.subject import Job
from offload_strategy.storage import Space, create_backend, probe
from offload_strategy.units import GiB, MiB, format_size, parse_size

_ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Run it and print the tables; 0 if everything came out as it must."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parameters", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="on the disk")
    parser.add_argument("--limit", default="4GiB", help="of the memory group")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--overlap", default="eager", choices=("eager", "commit", "off"))
    parser.add_argument("--pinned", default="1GiB", help="memory.pinned")
    parser.add_argument("--no-plain", action="store_true", help="leave plain PyTorch out")
    options = parser.parse_args(arguments)
    why = why_not()
    if why is not None:
        print(f"cannot run here: {why}")
        return 2
    limit = parse_size(options.limit)
    job = Job(
        options.width,
        options.layers,
        sequence=options.sequence,
        batch=options.batch,
        steps=options.steps,
        overlap=options.overlap,
        pinned=options.pinned,
    )
    print(json.dumps(describe_machine(options.dir)))
    good = True
    if not options.no_plain:
        status, events, peak = _run(job, limit, print)
        print(
            f"plain PyTorch within {format_size(limit)}: "
            f"{'killed' if status == -9 else f'status {status}'} after "
            f"{sum(e['event'] == 'step' for e in events)} steps, peak {format_size(peak)}"
        )
        good &= status == -9
    with tempfile.TemporaryDirectory(prefix="bigger-than-memory-", dir=options.dir) as place:
        saved = str(Path(place, "saved"))
        status, events, peak = _run(replace(job, directory=place, saved=saved), limit, print)
    steps = [event for event in events if event["event"] == "step"]
    table(steps, *_bound(job, options.dir))
    print(f"streamed within {format_size(limit)}: status {status}, peak {format_size(peak)}")
    good &= status == 0 and len(steps) == job.steps and steps[-1]["loss"] < steps[0]["loss"]
    return 0 if good else 1


def table(steps: list[dict[str, Any]], compute: float, read: float, write: float) -> None:
    """A row a step, and the median of all but the first.

    Args:
        steps: events.
        compute: seconds of computing alone.
        read: bytes per second of the path.
        write: likewise.
    """
    print(
        f"\ncomputing alone {compute:.2f} s a step; the path reads {read / 1e9:.2f} and writes "
        f"{write / 1e9:.2f} GB/s\n\n"
        "| step | loss | s | compute | read | write | stall | read GiB | written GiB | of bound |\n"
        "|---|---|---|---|---|---|---|---|---|---|"
    )
    ratios = []
    for step in steps:
        reading, writing = step["read_bytes"] / read, step["written_bytes"] / write
        ratios.append(step["seconds"] / max(compute, reading + writing))
        stall = sum(value for name, value in step.items() if name.endswith("_stall"))
        print(
            f"| {step['step']} | {step['loss']:.4f} | {step['seconds']:.2f} | {compute:.2f} | "
            f"{reading:.2f} | {writing:.2f} | {stall:.2f} | {step['read_bytes'] / GiB:.2f} | "
            f"{step['written_bytes'] / GiB:.2f} | {ratios[-1]:.3f} |"
        )
    if len(ratios) > 1:  # blocks are fetched ahead from the second step on
        print(f"median of all but the first: {statistics.median(ratios[1:]):.3f} of the bound\n")


def _bound(job: Job, directory: Path) -> tuple[float, float, float]:
    """Seconds of computing alone, and bytes per second read and written."""
    few, more = 2, 8
    seconds = {}
    for layers in (few, more):
        small = replace(job, layers=layers, steps=6, directory=None, saved=None)
        _, events, _ = _run(small, None, lambda line: None)
        steps = [event["seconds"] for event in events if event["event"] == "step"]
        seconds[layers] = min(steps)  # what it can be: memory is mapped in the first ones
    each = (seconds[more] - seconds[few]) / (more - few)
    space = Space(directory, "disk", 1 * GiB)
    backend = create_backend("posix", threads=2, block_size=32 * MiB)
    try:
        found = probe(space, backend, seconds=2.0)
    finally:
        backend.close()
        space.close()
    return seconds[few] + (job.layers - few) * each, found.read, found.write


def _run(
    job: Job, limit: int | None, say: Callable[[str], None]
) -> tuple[int, list[dict[str, Any]], int]:
    """Status, events and the group's peak in bytes of a run."""
    events: list[dict[str, Any]] = []
    with memory_group(limit) as group:
        command = [sys.executable, "-m", "benchmarks.parameters.subject", json.dumps(asdict(job))]
        process = subprocess.Popen(
            group.command(command), stdout=subprocess.PIPE, text=True, cwd=_ROOT
        )
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            events.append(event)
            say(_told(event))
        status = process.wait()
        return (-9 if status == 137 else status), events, group.peak_bytes()


def _told(event: dict[str, Any]) -> str:
    """An event as a line."""
    kind = event["event"]
    if kind == "start":
        return f"{event['parameters']:,} parameters, made in {event['seconds']:.1f} s"
    if kind == "step":
        text = (
            f"step {event['step']}: loss {event['loss']:.4f}, {event['seconds']:.2f} s (forward "
            f"{event['forward']:.2f}, backward {event['backward']:.2f}, step "
            f"{event['update']:.2f}; CPU {event['cpu_seconds']:.1f})"
        )
        if "read_bytes" in event:
            stalls = ", ".join(
                f"{name[:-6]} {event[name]:.2f}" for name in event if name.endswith("_stall")
            )
            text += (
                f", read {event['read_bytes'] / GiB:.2f} GiB, written "
                f"{event['written_bytes'] / GiB:.2f} GiB, stalls: {stalls}"
            )
        return text
    if kind == "saved":
        return f"saved {event['nbytes'] / GiB:.2f} GiB in {event['seconds']:.1f} s"
    return f"peak of the process {format_size(event['peak_bytes'])}"


if __name__ == "__main__":
    sys.exit(main())
