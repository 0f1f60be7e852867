"""`ssd-offload config | report | consolidate`: show, check and convert what is in files."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offload_strategy.checkpoints import consolidate
from offload_strategy.cli.options import add_options
from offload_strategy.config import CONFIG_VARIABLE, OffloadConfig, presets
from offload_strategy.io.bandwidth import history
from offload_strategy.plan_runtime.profile import write_text
from offload_strategy.units import format_size, markdown_table


def add_config_parser(commands: Any) -> None:
    """Add `config` to the subparsers of `ssd-offload`."""
    config = commands.add_parser("config", help="show and check configs")
    actions = config.add_subparsers(required=True, metavar="ACTION")

    show = actions.add_parser("show", help="print the config that would be used, defaults included")
    show.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="a YAML or JSON file, an Accelerate launch file, a preset, or JSON text "
        f"(default: ${CONFIG_VARIABLE}, else the defaults)",
    )
    show.set_defaults(run=lambda given: print(OffloadConfig.load(given.source).to_yaml(), end=""))

    check = actions.add_parser("check", help="check a config; exit status 2 if it is wrong")
    check.add_argument("file", metavar="FILE", help="as SOURCE of `show`")
    check.set_defaults(run=_check)

    schema = actions.add_parser("schema", help="print the JSON schema, the reference of all keys")
    schema.set_defaults(
        run=lambda _: print(json.dumps(OffloadConfig.model_json_schema(), indent=2))
    )

    actions.add_parser("presets", help="list the presets").set_defaults(run=_presets)


def _check(options: argparse.Namespace) -> None:
    OffloadConfig.load(options.file)
    print(f"{options.file}: ok")


def _presets(options: argparse.Namespace) -> None:
    for name, text in presets().items():
        first_line = text.partition("\n")[0].removeprefix("#").strip()
        print(f"{name:<14}{first_line}")


def add_report_parser(commands: Any) -> None:
    """Add `report` to the subparsers of `ssd-offload`."""
    parser = commands.add_parser(
        "report",
        help="show a run as an HTML page, or print the measured bandwidth of paths",
        description="Write the page of a run whose engine.report().save, or `report: FILE` in its "
        "config, wrote a file. Without one, print the bandwidth of paths in earlier runs, from "
        "which the next run starts.",
    )
    parser.add_argument("file", type=Path, nargs="?", metavar="RUN", help="the file of a run")
    add_options(parser, [("--html FILE", "the page (default: RUN with the ending .html)")])
    parser.add_argument("--json", action="store_true", help="print the bandwidth as JSON")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    if options.file is not None:
        # Here, because it takes a second to import.
        from offload_strategy.engine.run_report import RunReport

        run = RunReport.load(options.file)
        page = options.html or options.file.with_suffix(".html")
        write_text(page, run.page())
        print(f"{run}\n\nThe page: {page}")
        return
    kept = history.load_all_rates()
    rows = [asdict(of) | {way: asdict(one) for way, one in rates.items()} for of, rates in kept]
    print(json.dumps(rows, indent=2) if options.json else _known_paths(kept))


def _known_paths(kept: list[tuple[history.PathIdentity, history.Rates]]) -> str:
    folder = history.cache_directory()
    if folder is None:
        return "Nothing is kept of paths: $SSD_OFFLOAD_CACHE is empty, or there is no place for it."
    if not kept:
        return f"Nothing is known of any path yet. It will be kept in {folder}."
    rows = []
    for of, figures in kept:
        for way, figure in figures.items():
            runs = f"{figure.runs} run{'s' if figure.runs > 1 else ''}"
            source = runs if figure.source == "observed" else figure.source
            where, rate = (of.path, of.machine, of.processes, way), f"{figure.rate / 1e9:.3g}"
            rows.append((*where, rate, source, format_size(figure.nbytes), figure.date))
    table = markdown_table("path | machine | processes |  | GB/s | from | bytes | last", rows)
    return f"{table}\n\nKept in {folder}; what is removed there is forgotten."


def add_consolidate_parser(commands: Any) -> None:
    """Add `consolidate` to the subparsers of `ssd-offload`."""
    parser = commands.add_parser(
        "consolidate",
        help="make one plain file of a checkpoint that several ranks saved in parts",
        description="Make one file that torch.load reads of a folder that was saved with "
        "torch.distributed.checkpoint, or by Lightning in parts: a plain optimizer, or a Trainer "
        "with one device, loads it. Needs as much memory as the checkpoint is large.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="FOLDER", help="what the ranks saved")
    parser.add_argument("file", type=Path, metavar="FILE", help="is written, or replaced")
    parser.set_defaults(run=_consolidate)


def _consolidate(options: argparse.Namespace) -> None:
    keys = consolidate(options.checkpoint, options.file)
    print(f"{options.file}: {options.file.stat().st_size} bytes; {', '.join(keys)}")
