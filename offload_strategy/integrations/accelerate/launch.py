"""The launcher's side of Accelerate: from a section of the launch file to the training process.

    accelerate launch --config offload.yaml train.py

The section `ssd_offload_config:` is checked before the training process starts, so that a misspelt
key costs a second and not a queue's wait. It travels as JSON in $SSD_OFFLOAD_CONFIG, in which paths
are expanded but for $RANK and $LOCAL_RANK, as each training process has its own; and
$ACCELERATE_USE_SSD_OFFLOAD says that it is meant for Accelerate: the former alone is only a
default. A section wins over a $SSD_OFFLOAD_CONFIG from outside. `integrations/accelerate.py` is the
other end.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import yaml

from offload_strategy.config import OffloadConfig
from offload_strategy.errors import ConfigError

SECTION = "ssd_offload_config"
CONFIG_VARIABLE = "SSD_OFFLOAD_CONFIG"
ACTIVE_VARIABLE = "ACCELERATE_USE_SSD_OFFLOAD"

#: What the launcher's processes have each of their own.
_OF_RANKS = ("LOCAL_RANK", "RANK")

_LAUNCHER = "accelerate.commands.launch"
_INSTALLED = "_ssd_offload_installed"


def install_in_config(config_args: Any) -> None:
    """Let launch files have the section, which Accelerate would refuse as an unknown key.

    Args:
        config_args: The module `accelerate.commands.config.config_args`.
    """
    if getattr(config_args, _INSTALLED, False):
        return
    base = config_args.BaseConfig
    process_config = base.process_config

    def without_section(config_dict: dict[str, Any]) -> dict[str, Any]:
        config_dict.pop(SECTION, None)
        processed: dict[str, Any] = process_config(config_dict)
        return processed

    base.process_config = staticmethod(functools.wraps(process_config)(without_section))
    for reader, default in (
        ("from_yaml_file", "default_yaml_config_file"),
        ("from_json_file", "default_json_config_file"),
    ):
        _keep_section(base, reader, getattr(config_args, default))
    _export_if_main(config_args)
    setattr(config_args, _INSTALLED, True)


def install_in_launcher(launch: Any) -> None:
    """Make `accelerate launch` know `--config` and pass the section on.

    Args:
        launch: The module `accelerate.commands.launch`.
    """
    if getattr(launch, _INSTALLED, False):
        return
    parser, command = launch.launch_command_parser, launch.launch_command

    @functools.wraps(parser)
    def launch_command_parser(*args: Any, **kwargs: Any) -> argparse.ArgumentParser:
        return _with_config_option(parser(*args, **kwargs))

    @functools.wraps(command)
    def launch_command(args: argparse.Namespace) -> Any:
        path = args.config_file
        if path is None and not args.cpu and os.path.isfile(launch.default_config_file):
            path = launch.default_config_file
        with _variables(_environment_or_exit(path, args)):
            return command(args)

    launch.launch_command_parser = launch_command_parser
    launch.launch_command = launch_command
    setattr(launch, _INSTALLED, True)


def environment_for(path: str | None, args: argparse.Namespace | None = None) -> dict[str, str]:
    """Return the environment variables that carry the section of a launch file.

    Args:
        path: The launch file, if there is one.
        args: The launcher's arguments, some of which win over the file.

    Returns:
        No variables if there is no section. A file that cannot be read is left to Accelerate, which
        says so better.

    Raises:
        ConfigError: If the section is wrong, or the launch file starts something that cannot
            offload.
    """
    content = _content(path)
    if path is None or SECTION not in content:
        return {}
    distributed = str(content.get("distributed_type") or "NO")
    if distributed not in ("NO", "DEEPSPEED", "FSDP") and not distributed.startswith("MULTI_"):
        raise ConfigError(
            f"file {path!r}, {SECTION}: distributed_type is {distributed}; offloading works in one "
            f"process ('NO'), with data-parallel processes ('MULTI_GPU', 'MULTI_CPU'), with 'FSDP' "
            f"(fsdp_version 2) and with 'DEEPSPEED'. Set one of these, or remove the section"
        )
    several = distributed != "NO"
    return {CONFIG_VARIABLE: _section(path, several=several), ACTIVE_VARIABLE: "true"}


def _section(path: str, *, several: bool) -> str:
    """The section as JSON, in which variables stay that only the ranks have, if there are any."""
    marks = {name: f"(({name}))" for name in _OF_RANKS if several}
    with _variables(marks):
        section = OffloadConfig.load(path).model_dump_json(exclude_unset=True)
    for name, mark in marks.items():
        section = section.replace(mark, f"${{{name}}}")
    return section


def _content(path: str | None) -> Mapping[str, Any]:
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file) if path.endswith(".json") else yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, Mapping) else {}


def _keep_section(base: type, reader: str, default: str) -> None:
    """Keep the section on a config that is read: `accelerate config update` writes it back."""
    original = getattr(base, reader).__func__

    @functools.wraps(original)
    def from_file(cls: type, *args: Any, **kwargs: Any) -> Any:
        config = original(cls, *args, **kwargs)
        path = next((value for value in (*args, *kwargs.values()) if value is not None), default)
        content = _content(path)
        if SECTION in content:
            setattr(config, SECTION, content[SECTION])
        return config

    setattr(base, reader, classmethod(from_file))


def _with_config_option(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    with suppress(argparse.ArgumentError):  # An Accelerate that has a --config of its own.
        parser.add_argument(
            "--config",
            dest="config_file",
            default=None,
            help="The same as --config_file (added by offload-strategy).",
        )
    return parser


def _runs_as_main() -> bool:
    """Whether this is `python -m accelerate.commands.launch`.

    The launcher's code then runs as `__main__` and no post-import hook sees it; only the modules
    that it imports can be reached.
    """
    return getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "") == _LAUNCHER


def _export_if_main(config_args: Any) -> None:
    """Pass the section on where only the reading of the launch file can be seen."""
    load = config_args.load_config_from_file

    @functools.wraps(load)
    def load_config_from_file(config_file: str | None) -> Any:
        config = load(config_file)
        if _runs_as_main():
            path = config_file or config_args.default_config_file
            os.environ.update(_environment_or_exit(path))
        return config

    config_args.load_config_from_file = load_config_from_file


def _environment_or_exit(
    path: str | None, args: argparse.Namespace | None = None
) -> dict[str, str]:
    try:
        return environment_for(path, args)
    except ConfigError as error:
        sys.exit(f"accelerate launch: {error}")


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which the launcher copies to the process it starts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
