"""`ssd-offload plan --profile`: a lifetime plan for a profiled step."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime.plan_file import save_plan
from offload_strategy.plan_runtime.profile import PathRates, Profile
from offload_strategy.plan_runtime.recompute_mix import RecomputeMix, choose_mix
from offload_strategy.planner.replay_chart import draw
from offload_strategy.units import format_size, parse_size

_GIGA = 1e9


def add_profile_options(group: Any) -> None:
    """Add the options to a group of `ssd-offload plan`."""
    group.add_argument(
        "--profile", metavar="FILE", type=Path, help="JSON file of OffloadEngine.profile().save"
    )
    group.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="memory that the step may take (default: half of the saved tensors stay)",
    )
    group.add_argument(
        "--read", type=float, metavar="GB/s", help="rate of the path (default: as in the profile)"
    )
    group.add_argument(
        "--write", type=float, metavar="GB/s", help="rate of the path (default: as in the profile)"
    )
    group.add_argument(
        "--write-plan",
        metavar="FILE",
        type=Path,
        help="write the plan as JSON, one line per tensor, to read or change, or for planning.plan",
    )
    group.add_argument(
        "--no-recompute",
        action="store_true",
        help="recompute no block in backward, however slow the path is",
    )
    group.add_argument(
        "--picture",
        metavar="FILE",
        type=Path,
        help="draw transfers and memory over the step (svg, png)",
    )


def plan_profile(options: argparse.Namespace, profile: Profile) -> int:
    """Plan and replay a profiled step; return 1 if it does not fit.

    Raises:
        ConfigError: If an option is wrong.
    """
    profile = _with_rates(profile, options)
    limit = _limit(profile, options.device_memory)
    if options.no_recompute:
        profile = replace(profile, blocks=())
    mix = choose_mix(profile, limit)
    plan, found = mix.plan, mix.replay
    if options.picture is not None:
        draw(found, plan.limit, options.picture)
    if options.write_plan is not None:
        save_plan(plan, mix.profile, options.write_plan, mix.recomputed)
    if options.json:
        figures = {
            "recomputed": mix.recomputed,
            "plan": asdict(plan),
            "replay": asdict(replace(found, memory=(), spans=())),
        }
        print(json.dumps(figures, indent=2))
    else:
        print(_text(profile, mix))
    return 0 if plan.fits else 1


def _with_rates(profile: Profile, options: argparse.Namespace) -> Profile:
    given = {"read": options.read, "write": options.write}
    for name, rate in given.items():
        if rate is not None and not rate > 0:
            raise ConfigError(f"--{name} is {rate}; give more than 0 GB/s")
    rates = {name: _GIGA * rate for name, rate in given.items() if rate is not None}
    if not profile.paths and len(rates) < len(given):
        raise ConfigError("the profile knows no path: give --read and --write")
    paths = profile.paths or (PathRates("path", 1.0, 1.0),)
    # The given rate is that of all paths together.
    scaled = []
    for path in paths:
        changed = {
            name: rate * getattr(path, name) / sum(getattr(one, name) for one in paths)
            for name, rate in rates.items()
        }
        scaled.append(replace(path, **changed))
    return replace(profile, paths=tuple(scaled))


def _limit(profile: Profile, text: str | None) -> int:
    if text is None:
        return profile.other_bytes + (profile.peak_bytes - profile.other_bytes) // 2
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--device-memory: {error}") from error


def _text(profile: Profile, mix: RecomputeMix) -> str:
    found = mix.replay
    waits = ", ".join(f"{seconds:.3f} s for {what}" for what, seconds in found.stalls.items())
    lanes = "\n".join(
        f"| {name} | {format_size(use.nbytes) if use.nbytes else ''} | {use.busy_share:.0%} |"
        for name, use in found.lanes.items()
    )
    again = ""
    if mix.recomputed:
        again = (
            f"Recomputed in backward: {', '.join(mix.recomputed)} ({len(mix.recomputed)} of "
            f"{len(profile.blocks)} blocks that may be).\n\n"
        )
    return (
        f"{again}{mix.plan}\n\n"
        f"Replayed: a step of {found.step_seconds:.3f} s, {found.computing_seconds:.3f} s of it "
        f"computing; it waits {waits}. Peak {format_size(found.peak_bytes)}, without offload "
        f"{format_size(profile.peak_bytes)}.\n\n"
        f"| lane | moved | busy |\n|---|---|---|\n{lanes}"
    )
