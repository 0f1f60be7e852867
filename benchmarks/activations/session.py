"""Contenders in their own processes, which alternate."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.activations.models import HUNDRED_MILLION, Shape
from benchmarks.machine import cores
from benchmarks.turns import Subject, Turns, by_turns

#: Steps before those that count: the first one allocates and learns.
WARM_UP = 2


@dataclass(frozen=True)
class Setting:
    """What all contenders of a comparison have in common.

    Args:
        shape: of the models.
        device: where they train.
        host_capacity: of the dram tier of those that have one.
        memory: section of our config.
    """

    shape: Shape = HUNDRED_MILLION
    device: str = "cpu"
    host_capacity: str = "12GiB"
    memory: dict[str, Any] = field(default_factory=dict)

    def options(self, model: str, batch: int) -> dict[str, Any]:
        """For `subject`, but for the contender."""
        return {**asdict(self), "model": model, "batch": batch, "threads": cores()}


class Rows(Turns):
    """The steps of one contender, in the order of the alternations: what `subject` answered."""

    def moved(self, verb: str) -> float:
        """Median over the steps of activation bytes `written`, `read` or `kept`."""
        key = f"offload/activations/{verb}_bytes"
        return float(statistics.median(s.get("metrics", {}).get(key, 0.0) for s in self.steps))

    def stalled(self) -> float:
        """Median over the steps of seconds in which training waited for activations."""
        key = "offload/activations/stall_seconds"
        return float(statistics.median(s.get("metrics", {}).get(key, 0.0) for s in self.steps))

    def ratio(self, other: Turns, key: str) -> float:
        """As `Turns.ratio`, over the steps of both: some contenders train in more processes."""
        both = min(len(self.steps), len(other.steps))
        mine, theirs = Turns(self.name, self.steps[:both]), Turns(other.name, other.steps[:both])
        return mine.ratio(theirs, key)

    def agrees(self, other: Rows) -> bool:
        """Whether losses and gradients are the other's to the last bit, in the steps of both."""
        pairs = zip(self.steps, other.steps, strict=False)
        return all(one.get(key) == two.get(key) for one, two in pairs for key in _BITS)


#: What `subject` answers to the bit: a loss in every step, a digest of gradients in the last one.
_BITS = ("loss", "gradients")


def run(
    contenders: Mapping[str, dict[str, Any]],
    repeats: int,
    directory: Path,
    *,
    again: Sequence[str] = (),
    processes: int = 1,
) -> dict[str, Rows]:
    """Let contenders alternate, step by step.

    Args:
        contenders: options for `subject` by name.
        repeats: steps of each that count, in each of its processes.
        directory: on the disk.
        again: those that are to be told apart by a few percent. Where a process's memory comes to
            lie makes it faster or slower by as much for all of its life, so these train in several
            processes each, one after the other.
        processes: of each of those.
    """
    rows = _in_processes(contenders, repeats, directory)
    for _ in range(processes - 1 if again else 0):
        more = _in_processes({name: contenders[name] for name in again}, repeats, directory)
        for name in again:
            rows[name].steps += more[name].steps
    return rows


def _in_processes(
    contenders: Mapping[str, dict[str, Any]], repeats: int, directory: Path
) -> dict[str, Rows]:
    with contextlib.ExitStack() as stack:
        subjects = {}
        for name, options in contenders.items():
            subject = Subject(
                "benchmarks.activations.subject", name, {"dir": str(directory), **options}
            )
            subjects[name] = stack.enter_context(subject)
        last = WARM_UP + repeats - 1
        steps = by_turns(
            list(contenders),
            lambda name, number: subjects[name].ask({"digest": number == last}),
            warm_up=WARM_UP,
            repeats=repeats,
        )
    return {name: Rows(name, answers) for name, answers in steps.items()}
