"""The command `ssd-offload` and its subcommands."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence

from offload_strategy.errors import OffloadError


def program() -> int:
    """Run the command line as the only task of this process, and return its exit status."""
    parser = _parser()
    # A collection at exit would look through all that torch made: half a second of each command.
    gc.freeze()
    return _run(parser.parse_args())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with the words after `ssd-offload`; None for those of this process.

    Returns the exit status: 0 if all is well, 1 if a command found a problem, 2 if what the user
    gave is wrong, 130 after Ctrl-C.
    """
    return _run(_parser().parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    try:
        return int(options.run(options) or 0)
    except OffloadError as error:
        print(f"ssd-offload: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # `ssd-offload config schema | head` closes our output early: that is no error.
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("ssd-offload: interrupted", file=sys.stderr)
        return 130  # what a shell reports for a program that Ctrl-C ended


def _parser() -> argparse.ArgumentParser:
    from offload_strategy.cli import bench, doctor, file_commands, init, plan

    parser = argparse.ArgumentParser(
        prog="ssd-offload", description="Train models that do not fit, on host memory and SSDs."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    config = commands.add_parser("config", help="show and check configs")
    actions = config.add_subparsers(required=True, metavar="ACTION")
    for action in file_commands.ACTIONS:
        action.add_to(actions)
    for module in (init, bench, doctor, plan):
        module.COMMAND.add_to(commands)
    for command in (file_commands.REPORT, file_commands.CONSOLIDATE):
        command.add_to(commands)
    return parser
