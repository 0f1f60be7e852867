"""Contenders on one device by turns, until the time that they have is over."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.job import Job
from benchmarks.io.results import Skipped, alternating
from benchmarks.machine import say
from benchmarks.turns import Subject, Turns

#: Steps of a turn, of which the first does not count.
_STEPS = 3
#: Turns before those that count: states are made, amounts and orders are learned.
_WARM_UP = 2
#: Seconds that a contender may be silent, however little time is left.
_LEAST_PATIENCE = 20.0


class Deadline:
    """When something must be over.

    Args:
        seconds: from now.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; negative when it is over."""
        return self._end - time.monotonic()


@dataclass
class Outcome:
    """What a race found.

    Args:
        rows: turns by contender; each is a mean over the steps of it that count.
        parameters: of the model.
        skipped: who did not take part, or had to give up, and why.
    """

    rows: dict[str, Turns]
    parameters: int = 0
    skipped: dict[str, str] = field(default_factory=dict)


def race(
    names: Sequence[str],
    job: Job,
    directory: Path,
    deadline: Deadline,
    rounds: int | None = None,
) -> Outcome:
    """Let contenders train a job by turns; as many rounds as there is time for, at least one.

    Args:
        names: of `contenders`.
        job: what they train.
        directory: on the disk.
        deadline: of all of it.
        rounds: at most; None for as many as there is time for.
    """
    outcome = Outcome({})
    with contextlib.ExitStack() as stack:
        subjects: dict[str, Subject] = {}
        for name in names:
            options = {"contender": name, "job": job.options(), "dir": str(directory)}
            subjects[name] = stack.enter_context(
                Subject(
                    "benchmarks.gpu.subject",
                    name,
                    options,
                    patience=max(_LEAST_PATIENCE, deadline.left),
                )
            )

        def give_up(name: str, why: Exception) -> None:
            say(f"{name}: {why}")
            # Of a process that ended: the error below its traceback.
            outcome.skipped[name] = str(why).strip().splitlines()[-1]
            subjects.pop(name)

        for name in names:
            try:
                parameters = subjects[name].answer()["parameters"]
                outcome.parameters = max(outcome.parameters, parameters)
            except (Skipped, RuntimeError) as why:
                give_up(name, why)
        longest, number = 0.0, 0
        while subjects and number != rounds and (number == 0 or deadline.left > longest):
            begin = time.monotonic()
            for name in alternating(list(subjects), number):
                subjects[name].patience = max(_LEAST_PATIENCE, deadline.left)
                try:
                    steps = subjects[name].ask({"steps": _STEPS})["steps"]
                except (Skipped, RuntimeError) as why:
                    give_up(name, why)
                    outcome.rows.pop(name, None)
                    continue
                rows = outcome.rows.setdefault(name, Turns(name))
                rows.steps.append(_mean(steps))
            longest = max(longest, time.monotonic() - begin)
            number += 1
        for rows in outcome.rows.values():
            del rows.steps[: min(_WARM_UP, len(rows.steps) - 1)]
    return outcome


def _mean(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of numbers; the most of peaks; of bits all."""
    mean: dict[str, Any] = {}
    for key, value in steps[0].items():
        values = [step[key] for step in steps]
        if key in ("peak_bytes", "device_bytes", "host_bytes"):
            mean[key] = max(values)
        elif isinstance(value, int | float):
            mean[key] = statistics.fmean(values)
        else:
            mean[key] = values
    return mean
