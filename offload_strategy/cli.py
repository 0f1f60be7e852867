"""The command line: `ssd-offload config` shows and checks configs without starting anything."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from offload_strategy.config import CONFIG_VARIABLE, OffloadConfig, presets
from offload_strategy.errors import OffloadError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after `ssd-offload`; None means those of this process.

    Returns:
        The exit status: 0 if all is well, 2 if what the user gave is wrong.
    """
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except OffloadError as error:
        print(f"ssd-offload: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # `ssd-offload config schema | head` closes our output early: that is no error.
        sys.stderr.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ssd-offload", description="Train models that do not fit, on host memory and SSDs."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
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
    return parser


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


if __name__ == "__main__":
    sys.exit(main())
