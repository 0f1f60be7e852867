"""Contenders that train alternately, and the measured rates of the disk.

[Note: laps]
What a step leaves to be written is written during the next one, and what it reads ahead was asked
for by the one before. A contender that stopped after each step would do both while others train.
So contenders alternate in laps: consecutive steps, of which the first does not count.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.allocators import Allocator
from benchmarks.io import fio
from benchmarks.io.contender import Contender
from benchmarks.io.results import Context, Skipped
from benchmarks.machine import cores
from benchmarks.optimizer.contenders import PEERS
from benchmarks.optimizer.tasks import RandomTokens, Text, as_options
from benchmarks.turns import Subject, Turns, by_turns
from offload_strategy.units import MiB

#: Laps before those that count: states are made, amounts are learned.
WARM_UP = 1
#: Steps of a lap that count, and those before them.
COUNTED, UNCOUNTED = 2, 1
_FIO = fio.FioSettings("libaio", 4 * MiB, 16)
_PROBE_BYTES, _TICKET_BYTES = 256 * MiB, 64 * MiB


@dataclass
class Disk:
    """What the disk gave in each round, in bytes per second: the best of fio and of our store."""

    reads: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)

    @property
    def read(self) -> float:
        """Median."""
        return statistics.median(self.reads)

    @property
    def write(self) -> float:
        """Median."""
        return statistics.median(self.writes)

    def seconds(self, number: int, read_bytes: float, written_bytes: float) -> float:
        """What a round's rates need for so many bytes, one direction after the other."""
        return read_bytes / self.reads[number] + written_bytes / self.writes[number]


class _Probe:
    """Measures the disk; a context manager."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "fio"
        self._undo = contextlib.ExitStack()
        self._store = self._undo.enter_context(
            Contender(
                "ours",
                directory=str(directory),
                count=_PROBE_BYTES // _TICKET_BYTES,
                nbytes=_TICKET_BYTES,
            )
        )
        self._undo.callback(self._file.unlink, missing_ok=True)

    def __enter__(self) -> _Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def measure(self, disk: Disk) -> None:
        """Add the rates of this moment."""
        for direction, rates in (("write", disk.writes), ("read", disk.reads)):
            seconds = [self._store.ask(direction)["seconds"]]
            with contextlib.suppress(Skipped):  # no fio: ours alone
                seconds.append(fio.run(self._file, direction, _PROBE_BYTES, _FIO).seconds)
            rates.append(_PROBE_BYTES / min(seconds))


class Rows(Turns):
    """The laps of one contender: means over the steps of a lap that count, peaks of them."""

    @classmethod
    def of(cls, name: str, laps: Sequence[dict[str, Any]], uncounted: int = UNCOUNTED) -> Rows:
        """Rows of what the subject answered."""
        return cls(name, [_lap(lap["steps"][uncounted:]) for lap in laps])

    @property
    def losses(self) -> tuple[str, ...]:
        """Of all steps that count, as bits."""
        return tuple(loss for lap in self.steps for loss in lap["losses"])

    def ratios(self, other: Rows, key: str) -> list[float]:
        """Its laps over another's laps of the same rounds."""
        return [a / b for a, b in zip(self.values(key), other.values(key), strict=True)]


def _lap(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    numbers = [key for key, value in steps[0].items() if isinstance(value, int | float)]
    lap: dict[str, Any] = {key: statistics.fmean(step[key] for step in steps) for key in numbers}
    for key in ("peak_bytes", "anonymous_bytes"):
        lap[key] = max(step[key] for step in steps)
    lap["losses"] = [step["loss"] for step in steps]
    lap["norms"] = [step["norm"] for step in steps]
    lap["each_seconds"] = [step["seconds"] for step in steps]
    return lap


@dataclass
class Outcome:
    """What a session measured.

    Args:
        rows: by contender.
        disk: by round.
        parameters: of the model.
        skipped: contenders that cannot run here, and why.
    """

    rows: dict[str, Rows]
    disk: Disk
    parameters: int
    skipped: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every lap of every contender."""
        return asdict(self)


def start(
    stack: contextlib.ExitStack,
    name: str,
    options: Mapping[str, Any],
    task: RandomTokens | Text,
    directory: Path,
    threads: int | None = None,
    allocator: Allocator | None = None,
) -> tuple[Subject, int]:
    """Start a contender; returns it and the number of the model's parameters.

    Args:
        stack: ends it.
        name: of the contender.
        options: see `contenders.make`.
        task: what it trains.
        directory: on the disk.
        threads: that compute; all cores by default.
        allocator: of its memory; the best one by default.

    Raises:
        Skipped: it cannot run here.
    """
    threads = cores() if threads is None else threads
    allocator = allocator or Allocator.best()
    told = {"task": as_options(task), "threads": threads, "allocator": allocator, **options}
    subject = stack.enter_context(
        Subject(
            "benchmarks.optimizer.contender_process",
            name,
            {"dir": str(directory), **told},
            # DeepSpeed's own kernels ask OpenMP; torch is told by the subject.
            {"OMP_NUM_THREADS": str(threads), **allocator.environment()},
        )
    )
    return subject, subject.answer()["parameters"]


def run(
    contenders: Mapping[str, Mapping[str, Any]],
    task: RandomTokens | Text,
    context: Context,
    *,
    allocator: Allocator | None = None,
    counted: int = COUNTED,
    requests: Mapping[str, Mapping[str, Any]] | None = None,
) -> Outcome:
    """Train contenders alternately, lap by lap; see [Note: laps].

    Args:
        contenders: options by name; see `contenders.make`.
        task: what they train.
        context: the directory, and how many laps count.
        allocator: of everybody's memory; the best one by default.
        counted: steps of a lap that count.
        requests: what a lap is asked for besides its steps, by name.
    """
    skipped: dict[str, str] = {}
    subjects: dict[str, Subject] = {}
    parameters = 0
    disk = Disk()
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(_Probe(context.directory))
        for name, options in contenders.items():
            try:
                subjects[name], count = start(
                    stack, name, options, task, context.directory, allocator=allocator
                )
                parameters = max(parameters, count)
            except (Skipped, RuntimeError) as why:
                if options["contender"] not in PEERS:
                    raise  # a peer may be unable to run here, we may not
                context.say(f"{name} does not take part: {why}")
                skipped[name] = str(why)

        def ask(name: str, number: int) -> dict[str, Any]:
            request = (requests or {}).get(name, {})
            try:
                return subjects[name].ask({"steps": UNCOUNTED + counted, **request})
            except RuntimeError as why:
                if contenders[name]["contender"] not in PEERS:
                    raise
                # Ended for want of memory, for instance: what the others do still counts.
                context.say(f"{name} takes part no longer: {why}")
                skipped.setdefault(name, str(why))
                return {}

        def each_round(number: int) -> None:
            context.say(f"round {number + 1} of {context.repeats}")
            probe.measure(disk)

        laps = by_turns(
            list(subjects), ask, warm_up=WARM_UP, repeats=context.repeats, each_round=each_round
        )
    rows = {name: Rows.of(name, laps[name]) for name in subjects if name not in skipped}
    return Outcome(rows, disk, parameters, skipped)
