"""Processes that train, what came of them, and the path that they use."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.memory_group import memory_group
from benchmarks.parameters.job import Job
from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.bandwidth.probe import probe
from offload_strategy.io.regions.region import Region
from offload_strategy.telemetry import Direction
from offload_strategy.units import GiB, MiB, format_size

ROOT = Path(__file__).resolve().parents[2]
#: What trains plainly, or with everything streamed.
TRAINS = "benchmarks.parameters.subject"
#: The same in several processes that shard the model.
TRAINS_SHARDED = "benchmarks.parameters.sharded_subject"
#: How the last line of a traceback begins, also where a library says which rank it is.
_ERROR = re.compile(r"(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception)\b.*)")
_MOST_CHARACTERS = 200


@dataclass
class Ran:
    """What came of a process.

    Args:
        events: that it printed.
        status: that it ended with; -9 if it was killed.
        overdue: whether it was killed because it took too long.
        peak_bytes: the most that its memory group had; 0 without one.
        complaint: what its error output ended with.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    status: int = 0
    overdue: bool = False
    peak_bytes: int = 0
    complaint: str = ""

    @property
    def killed(self) -> bool:
        """Whether the system killed it, for memory."""
        return self.status == -9 and not self.overdue

    @property
    def end(self) -> str:
        """How it ended, in words."""
        if self.overdue:
            return "took too long"
        if self.killed:
            return "killed"
        return "ended well" if self.status == 0 else f"status {self.status}: {self.complaint}"

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Its events of a kind."""
        return [event for event in self.events if event["event"] == kind]

    def must(self, kind: str) -> dict[str, Any]:
        """Its event of a kind.

        Raises:
            RuntimeError: there is none.
        """
        found = self.of(kind)
        if not found:
            raise RuntimeError(f"a process should have {kind}, and {self.end}")
        return found[0]


def run(
    job: Job,
    say: Callable[[str], None],
    *,
    module: str | None = None,
    limit: int | None = None,
    seconds: float | None = None,
) -> Ran:
    """Run a job in its own process.

    Args:
        job: what it shall do.
        say: tells each event.
        module: that does it; None for plain PyTorch or streaming.
        limit: bytes of its memory group; None for no group.
        seconds: after which it is killed; None for never.
    """
    ran = Ran()
    module = module or (TRAINS_SHARDED if job.ranks > 1 else TRAINS)
    command = [sys.executable, "-m", module, json.dumps(asdict(job))]
    with contextlib.ExitStack() as stack:
        # A file: a pipe that nobody reads fills up.
        errors = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        group = None
        if limit is not None:
            group = stack.enter_context(memory_group(limit))
            command = group.command(command)
        process = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)
        )
        stack.callback(process.kill)  # does nothing when it has ended

        def give_up() -> None:
            ran.overdue = True
            process.kill()

        watch = threading.Timer(seconds or 0, give_up)
        stack.callback(watch.cancel)
        if seconds is not None:
            watch.start()
        assert process.stdout is not None
        for line in process.stdout:
            ran.events.append(json.loads(line))
            say(told(ran.events[-1]))
        status = process.wait()
        watch.cancel()
        ran.status = -9 if status == 137 else status
        if group is not None:
            ran.peak_bytes = group.peak_bytes()
        errors.seek(0)
        ran.complaint = last_words(errors.read())
    return ran


def last_words(text: str) -> str:
    """The error that an output ended with, in a line; without one, its last line.

    Args:
        text: an error output.
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line.strip("^~ ")]
    for place in reversed(range(len(lines))):
        found = _ERROR.match(lines[place])
        if found is not None:
            said = found[1]
            if ":" not in said and place:  # an assertion that says nothing
                said += f": {lines[place - 1]}"
            return said[:_MOST_CHARACTERS]
    return lines[-1][:_MOST_CHARACTERS] if lines else ""


class Bandwidth(NamedTuple):
    """Bytes per second of a path."""

    read: float
    write: float


def bandwidth(directory: Path) -> Bandwidth:
    """What a path gives now.

    Args:
        directory: on it.
    """
    region = Region(directory, "disk", 1 * GiB)
    backend = create_backend("posix", threads=2, block_size=32 * MiB)
    try:
        rates = probe(region, backend, seconds=2.0)
        return Bandwidth(rates[Direction.READ].rate, rates[Direction.WRITE].rate)
    finally:
        backend.close()
        region.close()


def told(event: dict[str, Any]) -> str:
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
    if kind == "loaded":
        return (
            f"loaded in {event['seconds']:.2f} s, peak of memory "
            f"{format_size(event['rise_bytes'])} higher, written "
            f"{event['written_bytes'] / GiB:.2f} GiB"
        )
    if kind == "losses":
        return f"losses {', '.join(f'{loss:.6f}' for loss in event['losses'])}"
    if kind in ("predicted", "measured"):
        return f"{kind} peak {format_size(event['peak_bytes'])}"
    return f"peak of the process {format_size(event['peak_bytes'])}"
