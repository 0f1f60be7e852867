"""`ssd-offload init`: writes a launch file for this machine, or adds its section to one."""

from __future__ import annotations

import argparse
import re
from importlib import resources
from pathlib import Path
from string import Template

import torch
import yaml

from offload_strategy.cli.options import Command, Option
from offload_strategy.cli.this_machine import known_path, usual_directories
from offload_strategy.config import OffloadConfig
from offload_strategy.config.directories import file_system_of
from offload_strategy.config.sources import ACCELERATE_SECTION
from offload_strategy.errors import ConfigError, OffloadError
from offload_strategy.host_memory.memory_limits import available_bytes
from offload_strategy.plan_runtime.profile import check_writable, write_text
from offload_strategy.units import GiB, format_size

_SECTION = re.compile(rf"^{ACCELERATE_SECTION}:.*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
#: Of host memory, for a tier in front of the drives; of free disk, for what the file proposes.
_HOST_SHARE, _DISK_SHARE = 0.5, 0.8
_ABOUT = (
    "Write a launch file for `accelerate launch` with the drives of this machine, measured for a "
    "moment unless `bench` or a run has measured them, and ask nothing. $SSD_OFFLOAD_DIR names "
    "another directory."
)
_OPTIONS: list[Option] = [
    ("file", "default: offload.yaml", {"nargs": "?", "type": Path, "default": "offload.yaml"}),
    ("--into FILE", "add the section to what `accelerate config` wrote"),
    ("--force", "replace the file, or the section"),
]


def _init(options: argparse.Namespace) -> None:
    file: Path = options.into or options.file
    before = _launch_file(file, options.force) if options.into else None
    if before is None:
        check_writable(file, replace=options.force)
    launch = f"accelerate launch --config {file} train.py"
    text, found = _text(file, launch)
    if before is not None:
        section = text[text.index(f"{ACCELERATE_SECTION}:") :]
        text = f"{_SECTION.sub('', before).rstrip()}\n\n{section}"
        old, new = (dict(yaml.safe_load(each)) for each in (before, text))
        if old | {ACCELERATE_SECTION: None} != new | {ACCELERATE_SECTION: None}:
            raise ConfigError(f"{file}: the section cannot be replaced; remove it by hand")
    OffloadConfig.load(yaml.safe_load(text))
    write_text(file, text)
    print(f"{file}: written for {found}.\n\nStart training with\n\n    {launch}")


def _launch_file(file: Path, force: bool) -> str:
    try:
        text = file.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--into: {file} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict) or file.suffix == ".json":
        raise ConfigError(f"--into: {file} is no YAML file of `accelerate config`; name one")
    if ACCELERATE_SECTION in content and not force:
        raise ConfigError(
            f"--into: {file} has a section {ACCELERATE_SECTION} already; give --force to replace it"
        )
    return text


def _text(file: Path, launch: str) -> tuple[str, str]:
    """Return the launch file, and what was found on the machine."""
    paths, refused, memory = [], [], available_bytes()
    for directory in usual_directories():
        try:
            paths.append(known_path(directory))
        except OffloadError as error:
            refused.append(str(error))
    if not paths:
        raise ConfigError(f"no directory can be used: {'; '.join(refused) or 'none is configured'}")
    gpus = torch.cuda.device_count()
    device = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "training on the CPU"
    found = f"{device}, {format_size(memory)} of free memory, {len(paths)} drive(s)"
    drives = []
    for one in paths:
        rates = f"{one.write / 1e9:.3g} GB/s written, {one.read / 1e9:.3g} GB/s read"
        free = f"{format_size(one.capacity_bytes)} free"
        quoted = one.name.replace("'", "''")
        drives += [
            f"# {file_system_of(one.name).kind}, {free}, {rates} ({one.sources['read']})",
            f"- '{quoted}'",
        ]
    host = f"- {{name: host, kind: dram, capacity: {_gib(_HOST_SHARE * memory)}}}\n    "
    template = resources.files("offload_strategy.configs").joinpath("accelerate/machine.yaml")
    text = Template(template.read_text(encoding="utf-8")).substitute(
        machine=found,
        launch=launch,
        file=file,
        distributed="MULTI_GPU" if gpus > 1 else "NO",
        processes=max(1, gpus),
        use_cpu=str(not gpus).lower(),
        memory=_gib(memory),
        host=host if gpus else "",  # without a GPU it is the memory that training needs
        paths="\n        ".join(drives),
        capacity=_gib(_DISK_SHARE * sum(one.capacity_bytes for one in paths)),
    )
    return text, found


def _gib(nbytes: float) -> str:
    return f"{max(1, int(nbytes / GiB))}GiB"


COMMAND = Command("init", _init, "write a launch file for this machine", _OPTIONS, _ABOUT)
