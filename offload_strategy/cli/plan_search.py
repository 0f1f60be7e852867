"""`ssd-offload plan --search`: the settings with the highest throughput, as a config file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from offload_strategy.cli.options import write_text
from offload_strategy.config import default_directory
from offload_strategy.errors import ConfigError
from offload_strategy.planner.request import Request
from offload_strategy.planner.search.config_output import config_yaml
from offload_strategy.planner.search.cpu_request import CpuRequest
from offload_strategy.planner.search.search_result import USUAL_TOKENS, USUAL_TOLERANCE, Space
from offload_strategy.planner.search.settings import Overlap, StateType
from offload_strategy.planner.search.settings_search import search

#: Value of `--device` for a machine without a GPU.
CPU = "cpu"
#: Options that need `--search`.
_OPTIONS = (
    *("max_batch", "max_tokens", "tolerance", "sequences", "allow"),
    *("write_config", "dir", "force", "duplex"),
)
#: Options of a plan that have no effect with `--search`.
_USELESS = ("gpu_price", "ssd_price", "host_price")
#: Options that have an effect only in a search on the CPU.
_OF_CPU = ("update_rate", "read", "write", "duplex")


def check_search_options(options: argparse.Namespace) -> None:
    """Raise a ConfigError that names options without effect with, or without, a search."""
    on_cpu = options.gpu == CPU
    if options.search and options.profile is not None:
        raise ConfigError("--search is for a model, --profile for a step of one: give one of them")
    if on_cpu and options.profile is None and not options.search:
        raise ConfigError(f"--device {CPU}: give --search as well; without it a GPU is looked at")
    if on_cpu and options.search and not (options.sequence or options.sequences):
        raise ConfigError("give --sequence as well: `ssd-offload plan --help` says how")
    if not options.search:
        _refuse(options, _OPTIONS, "give --search as well, or leave it out")
        return
    _refuse(options, _USELESS, "no effect with --search, which counts no costs; leave it out")
    if not on_cpu:
        _refuse(
            options,
            _OF_CPU,
            "no effect with --search for a GPU, which updates states itself and uses drives of the "
            "table; leave it out",
        )


def _refuse(options: argparse.Namespace, names: Iterable[str], why: str) -> None:
    values = {name: getattr(options, name) for name in names}
    # By identity: 0 counts as given.
    found = [name for name, value in values.items() if value is not None and value is not False]
    if found:
        raise ConfigError(f"{', '.join('--' + name.replace('_', '-') for name in found)}: {why}")


def plan_search(options: argparse.Namespace, request: Request | CpuRequest) -> int:
    """Search, print the result and write the config; return 1 if nothing fits.

    Raises a ConfigError if an option is wrong, or the file exists or cannot be written.
    """
    file = options.write_config
    if file is not None:
        _check_writable(file, options.force)
    found = search(request, _space(options))
    print(json.dumps(found.as_dict(), indent=2) if options.json else found)
    if not found.candidates:
        return 1
    if file is not None:
        text = config_yaml(found, options.dir or [str(default_directory())])
        write_text("--write-config", file, text, overwrite=options.force)
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


def _check_writable(file: Path, force: bool) -> None:
    """Raise errors about the file before the search."""
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(
            f"--write-config: {file} is no file in a directory that exists; name one that is"
        )
    if file.exists() and not force:
        raise ConfigError(f"--write-config: {file} is there already; give --force to overwrite it")
