"""`accelerate launch`: passes a section of the launch file on to the training process.

The section `ssd_offload_config:` is checked before the training process starts, so that a misspelt
key is reported at once. It is passed as JSON in $SSD_OFFLOAD_CONFIG; variables in paths are
expanded except $RANK and $LOCAL_RANK, which differ between the processes.
$ACCELERATE_USE_SSD_OFFLOAD activates it; plugin.py reads both variables. The section overrides a
$SSD_OFFLOAD_CONFIG of the environment.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import yaml

from offload_strategy.autoload import is_disabled
from offload_strategy.config import ACCELERATE_SECTION as SECTION
from offload_strategy.config import CONFIG_VARIABLE, OffloadConfig
from offload_strategy.errors import ConfigError

ACTIVE_VARIABLE = "ACCELERATE_USE_SSD_OFFLOAD"


@functools.cache  # it is installed once
def install_in_config(config_args: Any) -> None:
    """Make the module `accelerate.commands.config.config_args` accept the section."""
    base = config_args.BaseConfig
    process_config = base.process_config

    def without_section(config_dict: dict[str, Any]) -> dict[str, Any]:
        config_dict.pop(SECTION, None)
        return dict(process_config(config_dict))

    load = config_args.load_config_from_file

    @functools.wraps(load)
    def load_config_from_file(config_file: str | None) -> Any:
        config = load(config_file)
        path = config_file or config_args.default_config_file
        content = _content(path)
        if SECTION in content:  # `accelerate config update` writes it back
            setattr(config, SECTION, content[SECTION])
        # In `python -m accelerate.commands.launch` the launcher's code runs as `__main__`, where no
        # post-import hook sees it; only the modules that it imports can be reached.
        main = getattr(sys.modules.get("__main__"), "__spec__", None)
        if getattr(main, "name", "") == "accelerate.commands.launch":
            os.environ.update(_environment_or_exit(path))
        return config

    base.process_config = staticmethod(functools.wraps(process_config)(without_section))
    config_args.load_config_from_file = load_config_from_file


@functools.cache
def install_in_launcher(launch: Any) -> None:
    """Make the module `accelerate.commands.launch` accept `--config` and pass the section on."""
    from accelerate.utils import patch_environment

    parser, command = launch.launch_command_parser, launch.launch_command

    @functools.wraps(parser)
    def launch_command_parser(*args: Any, **kwargs: Any) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = parser(*args, **kwargs)
        with suppress(argparse.ArgumentError):  # An Accelerate that has a --config of its own.
            text = "The same as --config_file (added by offload-strategy)."
            made.add_argument("--config", dest="config_file", default=None, help=text)
        return made

    @functools.wraps(command)
    def launch_command(args: argparse.Namespace) -> Any:
        path = args.config_file
        if path is None and not args.cpu and os.path.isfile(launch.default_config_file):
            path = launch.default_config_file
        with patch_environment(**_environment_or_exit(path)):
            return command(args)

    launch.launch_command_parser = launch_command_parser
    launch.launch_command = launch_command


def environment_for(path: str | None) -> dict[str, str]:
    """Return the variables that carry the section of a launch file.

    Empty if there is no section, or if the file cannot be read: Accelerate reports that. Raises a
    ConfigError if the section is wrong, or the launch file starts something that cannot offload.
    """
    content = _content(path)
    if path is None or SECTION not in content or is_disabled():
        return {}
    distributed = str(content.get("distributed_type") or "NO")
    if distributed not in ("NO", "DEEPSPEED", "FSDP") and not distributed.startswith("MULTI_"):
        raise ConfigError(
            f"file {path!r}, {SECTION}: distributed_type is {distributed}; offloading works in one "
            f"process ('NO'), with data-parallel processes ('MULTI_GPU', 'MULTI_CPU'), with 'FSDP' "
            f"(fsdp_version 2) and with 'DEEPSPEED'. Set one of these, or remove the section"
        )
    # Not at the top: plugin.py would not be finished when Accelerate's import asks for its hook.
    from accelerate.utils import patch_environment

    placeholders = {name: f"(({name}))" for name in ("LOCAL_RANK", "RANK") if distributed != "NO"}
    with patch_environment(**placeholders):
        section = OffloadConfig.load(path).model_dump_json(exclude_unset=True)
    for name, placeholder in placeholders.items():
        section = section.replace(placeholder, f"${{{name}}}")
    return {CONFIG_VARIABLE: section, ACTIVE_VARIABLE: "true"}


def _content(path: str | None) -> Mapping[str, Any]:
    content = None
    if path is not None:
        with suppress(OSError, ValueError, yaml.YAMLError), open(path, encoding="utf-8") as file:
            content = json.load(file) if path.endswith(".json") else yaml.safe_load(file)
    return content if isinstance(content, Mapping) else {}


def _environment_or_exit(path: str | None) -> dict[str, str]:
    try:
        return environment_for(path)
    except ConfigError as error:
        sys.exit(f"accelerate launch: {error}")
