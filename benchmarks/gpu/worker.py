"""One process that has the device, does a task after the other, and is replaced when one ends it.

A task is a function of this package by module and name; it takes a dictionary and returns one.
Starting a process with a GPU and a library of models takes 10 s and more, which dozens of trainings
share this way; and never do two processes have the device at a time.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.gpu import device
from benchmarks.gpu.device import Unavailable
from benchmarks.turns import CANNOT, Subject, answers, requests

#: How long a task may take beyond the time that it was given, in which it should have ended.
_GRACE_SECONDS = 45.0
_START_SECONDS = 240.0


class Worker:
    """The process that has a device of a type, seen from its parent; a context manager."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.directory = directory
        self.machine: dict[str, Any] = {}
        self._subject: Subject | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()

    def rest(self) -> None:
        """End the process, so that another may have the device; the next task starts a new one."""
        if self._subject is not None:
            self._subject.end()
            self._subject = None

    def do(
        self, task: str, options: Mapping[str, Any], seconds: float, *, alone: bool = False
    ) -> dict[str, Any]:
        """Have a task done, "module.name" of this package; its process is ended if it is late.

        With `alone` that does nothing before and after it. Raises Skipped if it cannot be done
        here, and RuntimeError if it failed or took too long.
        """
        if alone:
            self.rest()
        subject = self._subject or self._start()
        subject.patience = max(1.0, seconds) + _GRACE_SECONDS
        begin = time.monotonic()
        try:
            answer = subject.ask({"task": task, "seconds": seconds, **options})
        except RuntimeError as error:
            self.rest()
            if time.monotonic() - begin >= subject.patience:
                raise RuntimeError(f"ended, as it took longer than {seconds:.0f} s") from error
            raise
        if alone or "error" in answer:  # after some errors a device does nothing more
            self.rest()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def _start(self) -> Subject:
        options = {"device": self.kind, "dir": str(self.directory)}
        subject = Subject("benchmarks.gpu.worker", self.kind, options, patience=_START_SECONDS)
        self.machine = subject.answer()
        self._subject = subject
        return subject


# ---------------------------------------------------------------------- the process's side
def main() -> None:
    """Do tasks until the input ends."""
    options = json.loads(sys.argv[1])
    device.prepare(options["device"])
    with answers() as answer:
        answer(device.describe(options["device"], Path(options["dir"])))
        for request in requests():
            module, _, name = request.pop("task").rpartition(".")
            task = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
            found = _perform(task, {**options, **request})
            with suppress(RuntimeError):  # an error of the device is the task's, and was told
                found["device_bytes_left"] = device.release_memory()
            answer(found)


def _perform(task: Any, options: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(task(options))
    except Unavailable as why:
        return {CANNOT: str(why)}
    except torch.OutOfMemoryError as error:
        return {CANNOT: f"out of memory: {str(error).splitlines()[0][:200]}"}
    except Exception as error:  # the others are of interest all the same
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


if __name__ == "__main__":
    main()
