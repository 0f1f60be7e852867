"""`ssd-offload plan SCRIPT`: runs a few steps of a training script, and plans for them."""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from pathlib import Path
from typing import Any

from offload_strategy.engine.profile_run import ProfileRun, profile_run
from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime.profile import Profile


def add_script_options(group: Any) -> None:
    """Add the options to a group of `ssd-offload plan`."""
    group.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ...",
        help="a training script that uses an offload engine, and its arguments: it is run for a "
        "few forward passes, for real, and then ended; options of plan come before it",
    )
    group.add_argument(
        "--passes",
        type=int,
        default=8,
        metavar="N",
        help="forward passes that are looked at (default: 8)",
    )
    group.add_argument("--write-profile", type=Path, metavar="FILE", help="as JSON, for --profile")


def profile_script(options: argparse.Namespace) -> Profile:
    """Run the script until its profile is known.

    Raises:
        ConfigError: If the script does not exist, or runs no forward passes with an engine.
    """
    file, *arguments = options.script
    if not Path(file).is_file():
        raise ConfigError(f"{file} is no file; give a training script")
    if options.passes < 2:
        raise ConfigError(f"--passes is {options.passes}; give 2 or more")
    with profile_run(options.passes) as found:
        _run(file, arguments)
    profile = found.profile
    if profile is None:
        raise ConfigError(_why(file, found))
    if options.write_profile is not None:
        profile.save(options.write_profile)
    return profile


def _run(file: str, arguments: list[str]) -> None:
    """Run `python FILE ARGUMENTS` with its output on standard error."""
    before = sys.argv, list(sys.path)
    sys.argv = [file, *arguments]
    sys.path.insert(0, str(Path(file).resolve().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
            runpy.run_path(file, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def _why(file: str, found: ProfileRun) -> str:
    if not found.seen:
        return (
            f"{file} ended without a forward pass of a model that an offload engine was attached "
            "to. Use the strategy, the plugin or OffloadEngine in it, with activations.enabled; "
            "under Accelerate: `accelerate launch --config_file FILE $(which ssd-offload) plan "
            f"{file}`"
        )
    return (
        f"{file} ended after {found.seen} forward passes with an engine; {found.passes} and a "
        "backward are needed. Give a smaller --passes, or let it train for longer."
    )
