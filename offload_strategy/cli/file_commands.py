"""`ssd-offload config | report | consolidate`: show, check and convert what is in files."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from offload_strategy.checkpoints import consolidate
from offload_strategy.cli.options import Command, Option
from offload_strategy.config import CONFIG_VARIABLE, OffloadConfig, presets
from offload_strategy.errors import ConfigError
from offload_strategy.io.bandwidth import history
from offload_strategy.plan_runtime.profile import write_text
from offload_strategy.units import format_size, markdown_table


def _show(options: argparse.Namespace) -> None:
    print(OffloadConfig.load(options.source).to_yaml(), end="")


def _check(options: argparse.Namespace) -> None:
    OffloadConfig.load(options.file)
    print(f"{options.file}: ok")


def _schema(options: argparse.Namespace) -> None:
    print(json.dumps(OffloadConfig.model_json_schema(), indent=2))


def _presets(options: argparse.Namespace) -> None:
    for name, text in presets().items():
        first_line = text.partition("\n")[0].removeprefix("#").strip()
        print(f"{name:<14}{first_line}")


def _report(options: argparse.Namespace) -> None:
    if options.file is None and options.html is not None:
        raise ConfigError("--html: name the RUN of which it is the page")
    if options.file is not None and options.json:
        raise ConfigError("--json is for what is known of paths: leave it out, or leave out RUN")
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


def _consolidate(options: argparse.Namespace) -> None:
    keys = consolidate(options.checkpoint, options.file)
    print(f"{options.file}: {options.file.stat().st_size} bytes; {', '.join(keys)}")


_SOURCE = (
    "a YAML or JSON file, an Accelerate launch file, a preset, or JSON text (default: "
    f"${CONFIG_VARIABLE}, else the defaults)"
)
_SHOWN: Option = ("source", _SOURCE, {"nargs": "?", "metavar": "SOURCE"})
_CHECKED: Option = ("file", "as SOURCE of `show`", {"metavar": "FILE"})
#: The actions of `config`.
ACTIONS = (
    Command("show", _show, "print the config that would be used, defaults included", [_SHOWN]),
    Command("check", _check, "check a config; exit status 2 if it is wrong", [_CHECKED]),
    Command("schema", _schema, "print the JSON schema, the reference of all keys"),
    Command("presets", _presets, "list the presets"),
)
REPORT = Command(
    "report",
    _report,
    "show a run as an HTML page, or print the measured bandwidth of paths",
    [
        ("file", "the file of a run", {"type": Path, "nargs": "?", "metavar": "RUN"}),
        ("--html FILE", "the page (default: RUN with the ending .html)"),
        ("--json", "print the bandwidth as JSON"),
    ],
    "Write the page of a run whose engine.report().save, or `report: FILE` in its config, wrote a "
    "file. Without one, print the bandwidth of paths in earlier runs, from which the next run "
    "starts.",
)
CONSOLIDATE = Command(
    "consolidate",
    _consolidate,
    "make one plain file of a checkpoint that several ranks saved in parts",
    [
        ("checkpoint", "what the ranks saved", {"type": Path, "metavar": "FOLDER"}),
        ("file", "is written, or replaced", {"type": Path, "metavar": "FILE"}),
    ],
    "Make one file that torch.load reads of a folder that was saved with "
    "torch.distributed.checkpoint, or by Lightning in parts: a plain optimizer, or a Trainer with "
    "one device, loads it. Needs as much memory as the checkpoint is large.",
)
