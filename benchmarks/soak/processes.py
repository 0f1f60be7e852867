"""Runs in processes of their own, which are killed, and compared with plain ones."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.soak.runs import Run, summary

#: A process that says nothing for so long hangs.
PATIENCE_SECONDS = 120.0
#: Seconds of rest of a process for each second of CPU time: other work on the machine goes on.
_REST = 0.5
_KEYS = ("losses", "weights", "states")


@dataclass
class Outcome:
    """What came of a run.

    Args:
        seed: of the run.
        factors: what it is counted by.
        verdict: "same" as plain PyTorch to the last bit, "different", "hang", "error" (one that
            nothing provoked, or not a typed one), "left" (something was left behind), or "refused"
            (the configuration, by a typed error).
        happened: how often the fault did.
        restarts: how many times training went on in another process.
        seconds: that it took.
        details: what is different, left, or said.
        run: all of what was drawn, where the verdict is a bad one.
    """

    seed: int
    factors: dict[str, str]
    verdict: str = "same"
    happened: int = 0
    restarts: int = 0
    seconds: float = 0.0
    details: list[str] = field(default_factory=list)
    run: dict[str, Any] | None = None


class Processes:
    """Starts processes that have imported what they need.

    Args:
        directory: where runs have their folders.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.soak.training"])

    def outcome(self, run: Run) -> Outcome:
        """Train a run plainly and offloaded, with its fault, and compare."""
        begin = time.monotonic()
        found = Outcome(run.seed, run.factors)
        with tempfile.TemporaryDirectory(prefix="soak-run-", dir=self._directory) as place:
            self._train(run, Path(place), found)
        found.seconds = round(time.monotonic() - begin, 2)
        if found.verdict not in ("same", "refused"):
            found.run = summary(run)
        return found

    def _train(self, run: Run, place: Path, found: Outcome) -> None:
        chance = random.Random(run.seed + 2)
        folder = place / "checkpoints"
        directories = [place / f"path{number}" for number in range(3)]
        for each in (folder, *directories):
            each.mkdir(mode=0o700)
        plain = self._stage(run, None, folder, place / "plain.log")
        if plain.end != "done":
            found.verdict, found.details = "error", [f"plain PyTorch: {plain.end}", plain.text]
            return
        kills = chance.randint(1, 2) if run.hostility == "kill" else 0
        resumed = False
        for attempt in range(9):
            kill = None
            if attempt < kills:
                at_save = chance.random() < 0.4
                kill = _Kill(
                    "saving" if at_save else "step",
                    # A checkpoint is still to come then.
                    chance.randrange(1, max(2, run.steps - run.every)),
                    chance.uniform(0, 0.03) if at_save else chance.uniform(0, 0.3),
                )
            stage = self._stage(
                run, directories, folder, place / f"{attempt}.log", kill=kill, resumed=resumed
            )
            found.happened += stage.result.get("happened", 0) + (stage.end == "killed")
            found.details += stage.result.get("left", [])
            if stage.end == "hang":
                found.verdict, found.details = "hang", [*found.details, stage.text]
                return
            if stage.end == "failed":
                found.verdict, found.details = "error", [*found.details, stage.text]
                return
            if "refused" in stage.result:
                found.verdict, found.details = "refused", [stage.result["refused"]]
                return
            if stage.end == "done" and "error" not in stage.result:
                break
            if "error" in stage.result:
                # The path has failed for good: training goes on with the others.
                resumed = True
                directories = directories[1:] + directories[:1]
                if run.tiers == "ssd of two paths":
                    directories = directories[1:] + directories[:1]
            found.restarts += 1
        else:
            found.verdict = "error"
            found.details.append("the run did not end")
            return
        different = [key for key in _KEYS if stage.result[key] != plain.result[key]]
        names = [*folder.iterdir(), *(p for each in directories for p in each.rglob("*"))]
        left = [str(p.relative_to(place)) for p in names if p.name != "last.ckpt"]
        found.details += [f"file {name}" for name in left]
        if different:
            found.verdict = "different"
            both = zip(stage.result["losses"], plain.result["losses"], strict=False)
            first = next((n for n, (a, b) in enumerate(both) if a != b), None)
            found.details = [f"{', '.join(different)}; first loss: {first}", *found.details]
        elif found.details:
            found.verdict = "left"

    def _stage(
        self,
        run: Run,
        directories: list[Path] | None,
        folder: Path,
        log: Path,
        *,
        kill: _Kill | None = None,
        resumed: bool = False,
    ) -> _Stage:
        """One process, from its start to its end."""
        ours, theirs = self._context.Pipe(duplex=False)
        task = (run, directories, folder, log, resumed, theirs)
        process = self._context.Process(target=_work, args=task, daemon=True)
        process.start()
        theirs.close()
        try:
            for what, value in _messages(ours):
                if what == "hang":
                    os.kill(process.pid or 0, signal.SIGUSR1)  # it writes where it is to its log
                    time.sleep(2)
                    return _Stage("hang", {}, _tail(log))
                if what in ("done", "failed"):
                    process.join(PATIENCE_SECONDS)
                    if process.exitcode is None:
                        return _Stage("hang", {}, "after its end: " + _tail(log))
                    text = _tail(log) if what == "failed" else ""
                    return _Stage(what, value if what == "done" else {}, text)
                if kill is not None and what == kill.what and value >= kill.number:
                    time.sleep(kill.seconds)
                    process.kill()
                    process.join()
                    return _Stage("killed", {}, "")
            process.join(PATIENCE_SECONDS)
            return _Stage("failed", {}, f"ended with {process.exitcode}: {_tail(log)}")
        finally:
            process.kill()
            process.join()
            process.close()
            ours.close()


@dataclass(frozen=True)
class _Kill:
    """When a process is killed: seconds after it has said something."""

    what: str
    number: int
    seconds: float


@dataclass(frozen=True)
class _Stage:
    """How a process ended: "done", "failed", "hang" or "killed"; its result, its log's end."""

    end: str
    result: dict[str, Any]
    text: str


def _messages(connection: Connection) -> Iterator[tuple[str, Any]]:
    """What a process says; ends with it."""
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            if not connection.poll(PATIENCE_SECONDS):
                yield "hang", None
            yield connection.recv()


def _work(
    run: Run,
    directories: list[Path] | None,
    folder: Path,
    log: Path,
    resumed: bool,
    connection: Connection,
) -> None:
    """Process entry."""
    import torch

    from benchmarks.soak import training

    with open(log, "a") as errors:
        for descriptor in (1, 2):
            os.dup2(errors.fileno(), descriptor)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    logging.getLogger("offload_strategy").setLevel(logging.WARNING)

    def say(what: str, value: Any) -> None:
        connection.send((what, value))

    try:
        result = training.train(run, directories, folder, say, rest=_REST, resumed=resumed)
        say("done", result)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        with contextlib.suppress(OSError):  # the parent has ended
            say("failed", None)


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_text(errors="replace")[-6000:]
    return ""
