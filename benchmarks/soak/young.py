"""The training of the long process in a process that has just begun, to judge the time of a step.

What the machine does to a step, such as work on other cores, it does to a process of any age. What
has grown during hours is in the long process alone.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.machine import fix_allocator
from benchmarks.soak.processes import PATIENCE_SECONDS
from benchmarks.soak.runs import Run
from benchmarks.soak.training import Training
from offload_strategy.telemetry import recorder

#: Instead of 65,536, which would take the first half hour to fill.
KEPT_RECORDS = 4096
#: Steps of a new process that are not timed.
_FIRST_STEPS = 5


class YoungProcess:
    """Goes on from a checkpoint in a new process, step by step.

    Args:
        run: what is trained.
        folder: of the checkpoint, which must not change before the constructor has returned.
        directory: where its tier has a directory.

    Raises:
        TimeoutError: the process is silent for too long.
        EOFError: it has ended.
    """

    def __init__(self, run: Run, folder: Path, directory: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._tier = tempfile.TemporaryDirectory(prefix="young-", dir=directory)
        self._connection, theirs = context.Pipe()
        arguments = (run, folder, Path(self._tier.name), theirs)
        self._process = context.Process(target=_train, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def step(self, number: int) -> tuple[tuple[float, float], str]:
        """Train a step; returns its seconds by the clock and of the processor, and its loss."""
        self._connection.send(number)
        return self._answer()

    def end(self) -> None:
        """End the process; the checkpoint stays as it is."""
        self._connection.send(None)
        self._process.join(PATIENCE_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            raise TimeoutError("the young process did not end")
        self._process.close()
        self._connection.close()
        self._tier.cleanup()

    def _answer(self) -> tuple[tuple[float, float], str]:
        if not self._connection.poll(PATIENCE_SECONDS):
            raise TimeoutError(f"the young process is silent for {PATIENCE_SECONDS:.0f} s")
        seconds, loss = self._connection.recv()
        return seconds, loss


def prepare() -> None:
    """Set what the long process and a young one have alike."""
    faulthandler.enable()
    torch.set_num_threads(1)
    fix_allocator()
    logging.getLogger("offload_strategy").setLevel(logging.ERROR)
    # An engine keeps records of its last transfers and stalls for `export_trace`. Their number is
    # limited; with a low limit it is reached within the warm-up.
    recorder._KEPT_RECORDS = KEPT_RECORDS


def timed_step(training: Training, number: int) -> tuple[float, float]:
    """Train a step; returns its seconds by the clock and of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    training.step(number)
    return time.perf_counter() - wall, time.process_time() - cpu


def _train(run: Run, folder: Path, tier: Path, connection: Connection) -> None:
    """Train what the other end says, in the new process."""
    prepare()
    training = Training(run, [tier], folder)
    for number in range(_FIRST_STEPS):
        training.step(number)
    training.reload()
    connection.send(((0.0, 0.0), ""))
    while (number := connection.recv()) is not None:
        seconds = timed_step(training, number)
        connection.send((seconds, training.losses.pop()))
    training.end()
