"""Contenders in processes of their own, which train by turns."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.activations.models import HUNDRED_MILLION, Shape
from benchmarks.io.results import in_turns
from benchmarks.machine import cores
from offload_strategy.units import KiB

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


@dataclass
class Rows:
    """The steps of one contender, in the order of the alternations.

    Args:
        name: of the contender.
        steps: what `subject` answered for each.
    """

    name: str
    steps: list[dict[str, Any]] = field(default_factory=list)

    def median(self, key: str) -> float:
        """Median over the steps of a figure."""
        return float(statistics.median(step[key] for step in self.steps))

    def ratio(self, other: Rows, key: str) -> float:
        """Median of the ratios to another's steps of the same alternations."""
        pairs = zip(self.steps, other.steps, strict=True)
        return float(statistics.median(mine[key] / theirs[key] for mine, theirs in pairs))

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
    rows = {name: Rows(name) for name in contenders}
    with contextlib.ExitStack() as stack:
        subjects = {}
        for name, options in contenders.items():
            subjects[name] = _Subject(name, {"dir": str(directory), **options})
            stack.callback(subjects[name].end)
        for number in range(WARM_UP + repeats):
            for name in in_turns(list(contenders), number):
                request = {"digest": number == WARM_UP + repeats - 1}
                answer = subjects[name].ask(request)
                if number >= WARM_UP:
                    rows[name].steps.append(answer)
    return rows


class _Subject:
    """A contender's process."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        module = "benchmarks.activations.subject"
        # A file: what the libraries have to say must not fill a pipe that nobody reads.
        self._errors = tempfile.NamedTemporaryFile("r")  # noqa: SIM115
        with open(self._errors.name, "w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", module, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Let it train a step; returns its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait(60)
            raise RuntimeError(
                f"{self.name} ended with status {status}:\n{self._errors.read()[-4000:]}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def allocator() -> str:
    """What is the same for all contenders."""
    from benchmarks.activations.subject import MMAP_THRESHOLD

    return f"glibc with a fixed mmap threshold of {MMAP_THRESHOLD // KiB} KiB"
