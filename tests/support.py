"""What the tests of several folders share: calls that fail, processes, and their environment."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

import pytest

from tests.module_map import ROOT


def raising(error: BaseException) -> Callable[..., NoReturn]:
    """A function that raises such an error; it accepts any arguments, without a look at them.

    The error is made anew each time, as its traceback holds the frames, and tensors, of its
    callers. Only its class and its `args` are copied: other attributes and notes are not.
    """

    def refuse(*_: object, **__: object) -> NoReturn:
        raise type(error)(*error.args)

    return refuse


def descriptors(process: int | str = "self") -> Iterator[tuple[str, str]]:
    """The open descriptors of a process, and what each is of; of this one none without /proc."""
    folder = f"/proc/{process}/fd"
    if process == "self" and not os.path.isdir(folder):
        return
    for name in os.listdir(folder):
        with suppress(OSError):  # closed meanwhile, or that of this very listing
            yield name, os.readlink(f"{folder}/{name}")


def run_python(*words: object, **options: Any) -> str:
    """Run Python in a process of its own; what it printed. The options are of `subprocess.run`."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, **{"cwd": ROOT, **options})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def run_forked(call: Callable[[], object]) -> None:
    """Make a call in a forked process; fail unless it returns there, and not False."""
    process = os.fork()
    if process == 0:
        try:
            os._exit(call() is False)
        finally:
            os._exit(2)
    assert os.waitpid(process, 0)[1] == 0


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """For folders whose conftest.py imports it: the variables of the user's are not there."""
    for name in ("SSD_OFFLOAD_CONFIG", "SSD_OFFLOAD_DIR", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
