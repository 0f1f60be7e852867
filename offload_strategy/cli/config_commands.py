"""`ssd-offload config`: shows and checks configs without starting anything."""

from __future__ import annotations

import argparse
import json
from typing import Any

from offload_strategy.config import CONFIG_VARIABLE, OffloadConfig, presets


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of `ssd-offload`."""
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
    show.set_defaults(run=_show)

    check = actions.add_parser("check", help="check a config; exit status 2 if it is wrong")
    check.add_argument("file", metavar="FILE", help="as SOURCE of `show`")
    check.set_defaults(run=_check)

    schema = actions.add_parser("schema", help="print the JSON schema, the reference of all keys")
    schema.set_defaults(run=_schema)

    names = actions.add_parser("presets", help="list the presets")
    names.set_defaults(run=_presets)


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
