"""Four processes that share a path, of which two are killed.

    python -m benchmarks.faults.sharing DIRECTORY MODE

is one of them; it begins when it reads a line.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from benchmarks.disks import loop_disk
from benchmarks.faults.subject import BEFORE, STEPS, Outcome, observed, settings, train
from offload_strategy import OffloadEngine
from offload_strategy.io.queues.path_lock import PathLock, PathLockHolder
from offload_strategy.units import MiB

#: What a process does: train to its end, stop between two steps, or stop when it has the turn.
ENDS, PAUSES, HOLDS = "ends", "pauses", "holds"
_ANSWER_SECONDS = 60.0
#: Long enough to see that the others wait, short enough for a test.
_WAIT_SECONDS = 0.5


def killed(place: Path) -> Outcome:
    """``kill -9`` of one process between two steps, and of one that has the turn."""
    with loop_disk(place, 320 * MiB) as disk:
        with observed(disk.directory) as outcome, contextlib.ExitStack() as stack:
            paused, holding, *others = (
                stack.enter_context(_process(disk.directory, mode))
                for mode in (PAUSES, HOLDS, ENDS, ENDS)
            )
            _begin(paused)
            assert _answer(paused) == PAUSES
            _begin(holding)
            assert _answer(holding) == HOLDS
            for other in others:
                _begin(other)
            time.sleep(_WAIT_SECONDS)
            ready, _, _ = select.select(
                [other.stdout for other in others if other.stdout], [], [], 0
            )
            assert not ready, "processes went on although another one has the turn"
            for process in (paused, holding):
                process.kill()
                process.wait(_ANSWER_SECONDS)
            for other in others:
                came_out = json.loads(_answer(other))
                if came_out != {"error": "None", "steps": STEPS, "weights": "right", "left": []}:
                    outcome.weights = f"of another process: {came_out}"
                other.wait(_ANSWER_SECONDS)
            outcome.whole_steps = STEPS
        lock = PathLock(disk.directory)
        if lock.others():
            outcome.left.append("the name of a process that uses the path")
        lock.acquire()
        lock.close()
    return outcome


@contextlib.contextmanager
def _process(directory: Path, mode: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", __name__, str(directory), mode]
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("begin\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _ANSWER_SECONDS)
    assert ready, "a process does not answer"
    line = process.stdout.readline().strip()
    assert line, f"a process ended with {process.wait(_ANSWER_SECONDS)}"
    return line


# ---------------------------------------------------------------------- one of the processes
def _main(directory: Path, mode: str) -> None:
    torch.set_num_threads(1)
    with observed(directory) as outcome:
        engine = OffloadEngine(settings(directory))
        sys.stdin.readline()
        if mode == HOLDS:
            mock.patch.object(PathLockHolder, "acquired", partial(_stop, HOLDS)).start()
        happen = {(1, BEFORE): lambda engine: _stop(PAUSES)} if mode == PAUSES else None
        train(engine, outcome, happen)
    came_out = {
        "error": str(outcome.error),
        "steps": outcome.whole_steps,
        "weights": outcome.weights,
        "left": outcome.left,
    }
    print(json.dumps(came_out), flush=True)


def _stop(word: str, *_: object) -> None:
    print(word, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
