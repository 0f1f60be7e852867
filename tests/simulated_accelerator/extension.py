"""The compiled part of the simulated accelerator."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from torch.utils import cpp_extension

_SOURCES = Path(__file__).parent / "csrc"
_BUILD = Path(__file__).parents[2] / "build" / "simulated_accelerator"


def _load() -> Any:
    """Compile what changed and import it, one process at a time."""
    if shutil.which("ninja") is None:  # A virtual environment that is not activated has its own.
        os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
    _BUILD.mkdir(parents=True, exist_ok=True)
    # PyTorch's lock is a file that outlives a process that is killed, and the next would wait for
    # it for ever. The system's lock ends with its process; whoever holds it removes the other one.
    with (_BUILD / "owner").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        (_BUILD / "lock").unlink(missing_ok=True)
        return cpp_extension.load(
            "offload_strategy_sim",
            [str(_SOURCES / "runtime.cpp"), str(_SOURCES / "operators.cpp")],
            extra_cflags=["-O1", "-std=c++20"],
            build_directory=str(_BUILD),
        )


extension = _load()
