"""`ssd-offload plan --search`: the settings with the highest throughput, as a config file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from offload_strategy.cli.plan_cpu import CPU
from offload_strategy.config import default_directory
from offload_strategy.errors import ConfigError
from offload_strategy.planner.request import Request
from offload_strategy.planner.search.config_output import config_yaml
from offload_strategy.planner.search.cpu_request import CpuRequest
from offload_strategy.planner.search.search_result import USUAL_TOKENS, USUAL_TOLERANCE, Space
from offload_strategy.planner.search.settings import Overlap, StateType
from offload_strategy.planner.search.settings_search import search

#: Options that need `--search`.
_OPTIONS = (
    "max_batch",
    "max_tokens",
    "tolerance",
    "sequences",
    "allow",
    "write_config",
    "dir",
    "force",
)
#: Options of a plan that have no effect with `--search`.
_USELESS = ("gpu_price", "ssd_price", "host_price")
#: Options that have an effect only in a search on the CPU.
_OF_CPU = ("update_rate", "read", "write", "duplex")


def add_search_options(group: Any) -> None:
    """Add the options to a group of `ssd-offload plan`."""
    group.add_argument(
        "--search",
        action="store_true",
        help="find batch, micro-batches, tiers and what to offload; a given --batch is kept",
    )
    group.add_argument(
        "--max-batch", type=int, metavar="N", help="largest batch if --batch is searched"
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"largest number of tokens of a step if --batch is searched (default: {USUAL_TOKENS})",
    )
    group.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="share of the throughput that a smaller batch may cost (default: "
        f"{USUAL_TOLERANCE}); 0 for the fastest settings with any batch",
    )
    group.add_argument(
        "--sequences",
        type=int,
        nargs="+",
        metavar="N",
        help="sequence lengths to choose from, instead of --sequence",
    )
    group.add_argument(
        "--duplex",
        action="store_true",
        help=f"with --device {CPU}: drives read and write at their full rates at the same time",
    )
    group.add_argument(
        "--allow",
        action="append",
        choices=("eager", "bfloat16"),
        help="also try eager updates, which forbid clipping, or states in bfloat16, which change "
        "numbers; may be repeated",
    )
    group.add_argument(
        "--write-config", type=Path, metavar="FILE", help="write the best settings as a config file"
    )
    group.add_argument(
        "--dir",
        action="append",
        metavar="PATH",
        help="directory on a drive for the config; may be repeated (default: as without a config)",
    )
    group.add_argument("--force", action="store_true", help="overwrite the file of --write-config")


def check_search_options(options: argparse.Namespace) -> None:
    """Refuse options that have no effect with, or without, a search.

    Raises:
        ConfigError: Naming them.
    """
    if options.search and options.profile is not None:
        raise ConfigError("--search is for a model, --profile for a step of one: give one of them")
    if options.gpu == CPU and options.profile is None and not options.search:
        raise ConfigError(f"--device {CPU}: give --search as well; without it a GPU is looked at")
    if options.gpu == CPU and options.search and not (options.sequence or options.sequences):
        raise ConfigError("give --sequence as well: `ssd-offload plan --help` says how")
    if not options.search:
        given = _given(options, (*_OPTIONS, "duplex"))
        if given:
            raise ConfigError(f"{given}: give --search as well, or leave it out")
        return
    given = _given(options, _USELESS)
    if given:
        raise ConfigError(f"{given}: no effect with --search, which counts no costs; leave it out")
    given = "" if options.gpu == CPU else _given(options, _OF_CPU)
    if given:
        raise ConfigError(
            f"{given}: no effect with --search for a GPU, which updates states itself and uses "
            f"drives of the table; leave it out"
        )


def plan_search(options: argparse.Namespace, request: Request | CpuRequest) -> int:
    """Search, print the result and write the config; return 1 if nothing fits.

    Args:
        options: Options of the command line.
        request: Model and machine.

    Raises:
        ConfigError: If an option is wrong, or the file exists or cannot be written.
    """
    if options.write_config is not None:
        _check_writable(options.write_config, options.force)
    found = search(request, _space(options))
    print(json.dumps(found.as_dict(), indent=2) if options.json else found)
    if not found.candidates:
        return 1
    if options.write_config is not None:
        directories = options.dir or [str(default_directory())]
        _write(options.write_config, config_yaml(found, directories), options.force)
    return 0


def _space(options: argparse.Namespace) -> Space:
    allowed = options.allow or ()
    overlaps: tuple[Overlap, ...] = get_args(Overlap)
    dtypes: tuple[StateType, ...] = get_args(StateType)
    if options.batch is not None and (options.max_batch or options.max_tokens):
        raise ConfigError(
            "--max-batch and --max-tokens are for a batch that is searched: leave out --batch, or "
            "them"
        )
    return Space(
        sequences=tuple(options.sequences or (options.sequence,)),
        batch=options.batch,
        max_batch=options.max_batch,
        max_tokens=USUAL_TOKENS if options.max_tokens is None else options.max_tokens,
        tolerance=USUAL_TOLERANCE if options.tolerance is None else options.tolerance,
        overlaps=tuple(one for one in overlaps if one != "eager" or one in allowed),
        state_dtypes=tuple(one for one in dtypes if one == "float32" or one in allowed),
    )


def _given(options: argparse.Namespace, names: Iterable[str]) -> str:
    """Return the options that were given, for messages."""
    values = {name: getattr(options, name) for name in names}
    # By identity: 0 counts as given.
    found = [name for name, value in values.items() if value is not None and value is not False]
    return ", ".join(f"--{name.replace('_', '-')}" for name in found)


def _check_writable(file: Path, force: bool) -> None:
    """Raise errors about the file before the search."""
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(
            f"--write-config: {file} is no file in a directory that exists; name one that is"
        )
    if file.exists() and not force:
        raise ConfigError(f"--write-config: {file} is there already; give --force to overwrite it")


def _write(file: Path, text: str, force: bool) -> None:
    try:
        with file.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise ConfigError(
            f"--write-config: {file} cannot be written: {error.strerror or error}"
        ) from error
