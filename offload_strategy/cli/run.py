"""`ssd-offload run`: starts a training with the settings that only a new process can have."""

from __future__ import annotations

import argparse
import os
import signal

from offload_strategy.cli.options import Command
from offload_strategy.errors import ConfigError
from offload_strategy.host_memory.c_allocator import launch_environment


def _run(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ConfigError("run: name the command to start: ssd-offload run python train.py")
    if hasattr(signal, "SIGPIPE"):
        # Python ignores it, and a command that is started from here would do so, too.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, {**os.environ, **launch_environment()})
    except OSError as error:
        raise ConfigError(f"run: {command[0]}: {error.strerror}") from error


COMMAND = Command(
    "run",
    _run,
    "start a training whose process needs less memory",
    [("command", "with its arguments", {"nargs": argparse.REMAINDER})],
    "Start a command, such as `python train.py`, with settings of the C library's allocator that "
    "only a new process can have. `accelerate launch` does this by itself.",
)
