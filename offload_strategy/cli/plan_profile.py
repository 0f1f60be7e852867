"""`ssd-offload plan --profile | SCRIPT`: a lifetime plan for a profiled step, and its replay."""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import sys
from dataclasses import asdict, replace
from pathlib import Path

from offload_strategy.engine.profile_run import profile_run
from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime import lifetime_plan
from offload_strategy.plan_runtime.profile import PathRates, Profile
from offload_strategy.plan_runtime.replay import StepReplay, replay
from offload_strategy.units import format_size, markdown_table


def plan_profile(options: argparse.Namespace, profile: Profile) -> int:
    """Plan and replay a profiled step; return 1 if it does not fit."""
    given = {"read": options.read, "write": options.write}
    rates = {name: rate for name, rate in given.items() if rate is not None}
    if profile.path is None and len(rates) < len(given):
        raise ConfigError("the profile knows no path: give --read and --write")
    path = replace(profile.path or PathRates("path", 1.0, 1.0), **rates)
    profile, limit = replace(profile, paths=(path,)), options.device_memory
    if limit is None:
        limit = profile.other_bytes + (profile.peak_bytes - profile.other_bytes) // 2
    plan = lifetime_plan.plan_lifetimes(profile, limit)
    found = replay(profile, plan)
    if options.write_plan is not None:
        lifetime_plan.save_plan(plan, profile, options.write_plan)
    if options.json:
        print(json.dumps({"plan": asdict(plan), "replay": asdict(found)}, indent=2))
    else:
        print(_text(profile, plan, found))
    return 0 if plan.fits else 1


def _text(profile: Profile, plan: lifetime_plan.LifetimePlan, found: StepReplay) -> str:
    waits = ", ".join(f"{seconds:.3f} s for {what}" for what, seconds in found.stalls.items())
    lanes = (
        (name, format_size(use.nbytes) if use.nbytes else "", f"{use.busy_share:.0%}")
        for name, use in found.lanes.items()
    )
    is_good = plan.fits and plan.hidden
    advice = "" if is_good else f"\n\nTo leave less to the path, {lifetime_plan.CHECKPOINT}."
    return (
        f"{plan}\n\n"
        f"Replayed: a step of {found.step_seconds:.3f} s, {found.computing_seconds:.3f} s of it "
        f"computing; it waits {waits}. Peak {format_size(found.peak_bytes)}, without offload "
        f"{format_size(profile.peak_bytes)}.\n\n"
        f"{markdown_table('lane | moved | busy', lanes)}{advice}"
    )


def profile_script(options: argparse.Namespace) -> Profile:
    """Run the script until its profile is known, or raise a ConfigError that says why it is not."""
    file, *arguments = options.script
    if not Path(file).is_file():
        raise ConfigError(f"{file} is no file; give a training script")
    if options.passes < 2:
        raise ConfigError(f"--passes is {options.passes}; give 2 or more")
    with profile_run(options.passes) as found:
        _run(file, arguments)
    if not found.seen:
        raise ConfigError(
            f"{file} ended without a forward pass of a model that an offload engine was attached "
            "to. Use the strategy, the plugin or OffloadEngine in it, with activations.enabled; "
            "under Accelerate: `accelerate launch --config_file FILE $(which ssd-offload) plan "
            f"{file}`"
        )
    if found.profile is None:
        raise ConfigError(
            f"{file} ended after {found.seen} forward passes with an engine; {found.passes} and a "
            "backward are needed. Give a smaller --passes, or let it train for longer."
        )
    if options.write_profile is not None:
        found.profile.save(options.write_profile)
    return found.profile


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
