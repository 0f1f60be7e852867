"""Contenders in processes of their own, which train by turns."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping
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

    @property
    def bits(self) -> set[tuple[str, ...]]:
        """The losses of all steps and the gradients of the last one, as bits."""
        return {(*(step["loss"] for step in self.steps), self.steps[-1]["gradients"])}


def run(contenders: Mapping[str, dict[str, Any]], repeats: int, directory: Path) -> dict[str, Rows]:
    """Let contenders train by turns, step by step.

    Args:
        contenders: options for `subject` by name.
        repeats: steps of each that count.
        directory: on the disk.
    """
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
