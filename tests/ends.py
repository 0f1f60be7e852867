"""Scripts that end one way or another, each in a fork of a process that has all imports."""

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import offload_strategy.engine.offload_engine  # noqa: F401  # forks shall have it
from tests.support import descriptors


def open_files(directory: Path, process: int | str = "self") -> list[str]:
    """What a process has open below a directory, and the directory itself; deleted files too."""
    targets = (target for _, target in descriptors(process))
    return [target for target in targets if f"{target}/".startswith(f"{directory}/")]


def outcomes(rank: int, directory: Path, scripts: dict[str, tuple[str, int]]) -> list[Any]:
    """What came of each script, for `run_ranks`.

    The argument of a script is the directory of its tier. One that has a signal gets it when it has
    printed "ready".
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return [
        _outcome(directory / name.replace(" ", "-"), code, how)
        for name, (code, how) in scripts.items()
    ]


def _outcome(home: Path, code: str, how: int) -> dict[str, Any]:
    place, output, errors = home / "place", home / "output", home / "errors"
    place.mkdir(parents=True)
    output.touch()
    process = os.fork()
    if process == 0:
        for file, descriptor in ((output, 1), (errors, 2)):
            os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), descriptor)
        faulthandler.dump_traceback_later(120, exit=True)
        os.chdir(home)
        os.environ["SSD_OFFLOAD_DIR"] = str(place)
        sys.argv = ["training", str(place)]
        # As in a script, what it raises ends the interpreter, which then finds what it leaves.
        exec(compile(code, "<training>", "exec"), sys.modules["__main__"].__dict__)
        sys.exit()
    in_use: list[str] = []
    press_at = 0.0
    while not _ended(process):
        if how and time.monotonic() > press_at and "ready" in output.read_text():
            in_use = in_use or open_files(place, process)
            os.kill(process, how)
            # Python drops a KeyboardInterrupt that arrives inside a finalizer: press Ctrl-C again.
            press_at = time.monotonic() + 20
        time.sleep(0.005)
    _, status = os.waitpid(process, 0)
    return {
        "status": os.waitstatus_to_exitcode(status),
        "output": output.read_text(),
        "errors": errors.read_text(),
        "in_use": [file for file in in_use if file.startswith(f"{place}/")],
        "left": os.listdir(place),
    }


def _ended(process: int) -> bool:
    """Whether it has; its status is kept."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
