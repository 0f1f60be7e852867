"""Rates of paths that earlier runs measured: a small file for each path in the cache directory.

[Note: where rates are saved]
Nothing is ever left on a path itself, so its rates are saved in $SSD_OFFLOAD_CACHE (empty: never),
else in `offload-strategy` in the user's cache directory. Home directories are shared between
machines, disks are replaced, and processes share paths: rates hold only for the same machine, file
system, number of processes, backend and depth.

[Note: one odd run]
A run moves a saved rate half of the way, by ratio, and by no more than a factor of two. A file that
is unreadable or of another kind is ignored; a file that cannot be written is not an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from offload_strategy.config.directories import expand_path
from offload_strategy.io.backends.protocol import Backend
from offload_strategy.io.regions.block_devices import is_block_device
from offload_strategy.telemetry import Direction, get_logger

logger = get_logger(__name__)

CACHE_VARIABLE = "SSD_OFFLOAD_CACHE"
#: Our files have a few hundred bytes.
_MAX_FILE_BYTES = 64 * 1024
_MAX_CHANGE = 2.0
_STRICT = ConfigDict(strict=True)


@dataclass(frozen=True, config=_STRICT)
class PathIdentity:
    """What rates belong to: the same path, used in the same way.

    `device` is the file system's number, or the size of a block device in bytes; `processes` use
    the path together; `backend` is a class name and `depth` its requests in flight.
    """

    machine: str
    path: str
    device: int
    processes: int
    backend: str
    depth: int

    @classmethod
    def of(cls, path: Path, fd: int, *, processes: int, backend: Backend) -> PathIdentity:
        """Identify a path; `fd` is a file there, or the device."""
        device = 0  # of a path that does not answer; its first request tells why
        with contextlib.suppress(OSError):
            is_device = is_block_device(path)
            device = os.lseek(fd, 0, os.SEEK_END) if is_device else os.fstatvfs(fd).f_fsid
        name, depth = type(backend).__name__, backend.depth
        return cls(platform.node(), str(path), device, processes, name, depth)

    @property
    def file_name(self) -> str:
        """Name of the file with its rates."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32] + ".json"


@dataclass(frozen=True, config=_STRICT)
class MeasuredRate:
    """Bytes per second over `nbytes` in all `runs`, the last of a `date` (ISO 8601, UTC)."""

    rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    source: Literal["observed", "probe"]
    nbytes: Annotated[int, Field(ge=0)]
    runs: Annotated[int, Field(ge=0)] = 1
    date: str = ""


Rates = Mapping[Direction, MeasuredRate]
"""The known directions of a path."""


@dataclass(frozen=True, config=_STRICT)
class _SavedRates:
    format: Literal[1]
    of: PathIdentity
    read: MeasuredRate | None = None
    write: MeasuredRate | None = None

    @property
    def rates(self) -> Rates:
        known = {Direction.READ: self.read, Direction.WRITE: self.write}
        return {direction: rate for direction, rate in known.items() if rate is not None}


_FILE = TypeAdapter(_SavedRates)


def updated_rate(before: MeasuredRate | None, rate: float, nbytes: int) -> MeasuredRate:
    """The rate to save after a run that began with `before`; see [Note: one odd run]."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    runs = 0
    if before is not None:
        change = min(max(math.sqrt(rate / before.rate), 1 / _MAX_CHANGE), _MAX_CHANGE)
        rate = before.rate * change
        if before.source == "observed":  # a probe is not a run, and its few bytes do not count
            runs, nbytes = before.runs, nbytes + before.nbytes
    return MeasuredRate(rate, "observed", nbytes, runs + 1, date)


def cache_directory() -> Path | None:
    """Where rates are saved, or None if nowhere; see [Note: where rates are saved]."""
    try:
        given = os.environ.get(CACHE_VARIABLE)
        if given is not None:
            return Path(expand_path(given)) if given.strip() else None
        usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return usual / "offload-strategy" if usual.is_absolute() else None
    except (ValueError, RuntimeError) as error:  # an unset variable in it; no home directory
        logger.info("rates of paths are not saved: %s", error)
        return None


def load_rates(identity: PathIdentity) -> Rates:
    """The rates of a path that earlier runs saved; empty if nothing is known."""
    folder = cache_directory()
    saved = None if folder is None else _read(folder / identity.file_name)
    return saved.rates if saved is not None and saved.of == identity else {}


def load_all_rates() -> list[tuple[PathIdentity, Rates]]:
    """All saved rates, sorted by path."""
    folder = cache_directory()
    files = sorted(folder.glob("*.json")) if folder is not None and folder.is_dir() else []
    saved = [one for file in files if (one := _read(file)) is not None]
    saved.sort(key=lambda one: (one.of.machine, one.of.path, one.of.processes))
    return [(one.of, one.rates) for one in saved]


def save_rates(identity: PathIdentity, rates: Rates) -> None:
    """Save rates of a path for the next run, if there is a place for them. Never fails."""
    folder = cache_directory()
    if folder is None:
        return
    content = _SavedRates(1, identity, rates.get(Direction.READ), rates.get(Direction.WRITE))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Readable for its owner alone, under a new name; then it replaces the old file.
        with (
            contextlib.suppress(FileNotFoundError),  # at the end: nothing has the new name then
            tempfile.NamedTemporaryFile(suffix=".partial", dir=folder) as partial,
        ):
            partial.write(_FILE.dump_json(content, indent=1, exclude_none=True) + b"\n")
            partial.flush()
            os.replace(partial.name, folder / identity.file_name)
    except OSError as error:
        logger.info("rates of %s are not saved in %s: %s", identity.path, folder, error)


def _read(file: Path) -> _SavedRates | None:
    """Read a file; None if there is none, or it is not one of ours."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(file, flags), "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
                raise ValueError("it is not a small file")
            if status.st_uid != os.geteuid():
                raise ValueError("it belongs to another user")
            return _FILE.validate_json(stream.read())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason: object = error
        if isinstance(error, ValidationError):  # whose own text has several lines
            first = error.errors(include_url=False)[0]
            reason = ": ".join((*map(str, first["loc"]), first["msg"]))
        logger.warning("%s is ignored, and may be removed: %s", file, reason)
        return None
