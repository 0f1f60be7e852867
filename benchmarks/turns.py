"""Contenders in their own processes, which alternate.

A subject is a module that is run as ``python -m MODULE OPTIONS`` with JSON options. It reads one
line of JSON per request from standard input and writes one line of JSON per answer to standard
output; it ends when its input ends. `answers` is the subject's side, `Subject` the runner's.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.io.results import Skipped, alternating

#: How long a subject may be silent: its first answer waits for imports, and for compilers.
_PATIENCE_SECONDS = 900.0
#: What a subject that cannot run answers first, with the reason.
CANNOT = "cannot"


@contextlib.contextmanager
def answers() -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """In a subject: the function that answers; whatever libraries print goes elsewhere."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def answer(figures: Mapping[str, Any]) -> None:
            print(json.dumps(figures), file=out, flush=True)

        yield answer


def requests() -> Iterator[dict[str, Any]]:
    """In a subject: what it is asked for, until the runner has no more."""
    for line in sys.stdin:
        yield json.loads(line)


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


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Args:
        status: that it ended with; None if its time was over.
        lines: of its output.
        errors: its error output.
    """

    status: int | None
    lines: list[str]
    errors: str


def run_program(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a program in the root of the repository, and end it when its time is over.

    Args:
        command: its words.
        seconds: that it has.
        environment: variables on top of this process's.
    """
    status: int | None = None
    root, variables = Path(__file__).resolve().parents[1], {**os.environ, **(environment or {})}
    # Files, which hold what it has said when it is ended.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = subprocess.run(
                command, stdout=out, stderr=errors, cwd=root, env=variables, check=False,
                timeout=max(1.0, seconds),
            ).returncode  # fmt: skip
        out.seek(0)
        errors.seek(0)
        return Ended(status, out.read().splitlines(), errors.read())


class Subject:
    """A contender's process; a context manager.

    Args:
        module: that it runs.
        name: of the contender, for messages.
        options: of the subject; must be fit for JSON.
        environment: variables on top of this process's.
        patience: seconds that it may be silent; then it is ended.
    """

    def __init__(
        self,
        module: str,
        name: str,
        options: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        patience: float = _PATIENCE_SECONDS,
    ) -> None:
        self.name = name
        self.patience = patience
        # A file: what the libraries have to say must not fill a pipe that nobody reads.
        self._errors = tempfile.NamedTemporaryFile("r", errors="replace")  # noqa: SIM115
        with open(self._errors.name, "w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", module, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=Path(__file__).resolve().parents[1],
                env={**os.environ, **(environment or {})},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Have something done; returns the answer."""
        self.tell(request)
        return self.answer()

    def tell(self, request: Mapping[str, Any]) -> None:
        """Have something begun; `answer` waits for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to what was told.

        Raises:
            Skipped: it says that it cannot run here.
            RuntimeError: it ended, or did not answer.
        """
        assert self._process.stdout is not None
        watch = threading.Timer(self.patience, self._process.kill)
        watch.daemon = True
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            status = self._process.wait(60)
            raise RuntimeError(
                f"{self.name} ended with status {status}:\n{self._errors.read()[-4000:]}"
            )
        answer: dict[str, Any] = json.loads(line)
        if CANNOT in answer:
            raise Skipped(f"{self.name}: {answer[CANNOT]}")
        return answer

    def end(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


@dataclass
class Turns:
    """What one contender answered, in the order of the alternations.

    Args:
        name: of the contender.
        steps: its answers, those that count.
    """

    name: str
    steps: list[dict[str, Any]] = field(default_factory=list)

    def values(self, key: str) -> list[float]:
        """A figure of every answer."""
        return [float(step[key]) for step in self.steps]

    def median(self, key: str) -> float:
        """Median over the answers of a figure."""
        return float(statistics.median(self.values(key)))

    def ratio(self, other: Turns, key: str) -> float:
        """Median of the ratios to another's answers of the same alternations."""
        pairs = zip(self.values(key), other.values(key), strict=True)
        return float(statistics.median(mine / theirs for mine, theirs in pairs))


def by_turns(
    names: Sequence[str],
    ask: Callable[[str, int], dict[str, Any]],
    *,
    warm_up: int,
    repeats: int,
    each_round: Callable[[int], None] = lambda number: None,
) -> dict[str, list[dict[str, Any]]]:
    """Ask contenders alternately, in an order that begins with another one in every round.

    Args:
        names: of the contenders.
        ask: of a name and the number of the round; returns the answer.
        warm_up: rounds before those that count.
        repeats: rounds that count.
        each_round: called with the number of a round that counts before it begins.

    Returns:
        The answers that count by name.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(warm_up + repeats):
        if number >= warm_up:
            each_round(number - warm_up)
        for name in alternating(list(names), number):
            answer = ask(name, number)
            if number >= warm_up:
                found[name].append(answer)
    return found
