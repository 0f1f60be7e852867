"""`ssd-offload report`: predicted and measured figures of a run, and the bandwidth of paths."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offload_strategy.io.bandwidth.history import (
    PathIdentity,
    Rates,
    cache_directory,
    load_all_rates,
)
from offload_strategy.plan_runtime.predicted_and_measured import PredictionComparison
from offload_strategy.units import format_size


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of `ssd-offload`."""
    parser = commands.add_parser(
        "report",
        help="compare a run with its prediction, and print the measured bandwidth of paths",
        description="Print predicted and measured figures of a step from a file that "
        "OffloadEngine.compare_prediction().save wrote. Without a file, print the bandwidth of "
        "paths in earlier runs, from which the next run starts.",
    )
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="of a run")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.file is not None:
        found = PredictionComparison.load(options.file)
        print(json.dumps(found.as_dict(), indent=2) if options.json else found)
        return
    kept = load_all_rates()
    print(json.dumps([_as_dict(*one) for one in kept], indent=2) if options.json else _text(kept))


def _as_dict(of: PathIdentity, figures: Rates) -> dict[str, Any]:
    return asdict(of) | {str(way): asdict(figure) for way, figure in figures.items()}


def _text(kept: list[tuple[PathIdentity, Rates]]) -> str:
    folder = cache_directory()
    if folder is None:
        return "Nothing is kept of paths: $SSD_OFFLOAD_CACHE is empty, or there is no place for it."
    if not kept:
        return f"Nothing is known of any path yet. It will be kept in {folder}."
    rows = [
        "| path | machine | processes | | GB/s | from | bytes | last |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for of, figures in kept:
        for way, figure in figures.items():
            runs = f"{figure.runs} run{'s' if figure.runs > 1 else ''}"
            source = runs if figure.source == "observed" else figure.source
            rows.append(
                f"| {of.path} | {of.machine} | {of.processes} | {way} | {figure.rate / 1e9:.3g} "
                f"| {source} | {format_size(figure.nbytes)} | {figure.date} |"
            )
    return "\n".join([*rows, "", f"Kept in {folder}; what is removed there is forgotten."])
