"""What paths carried in earlier runs: a small file for each, in the user's cache directory.

[Note: where figures of paths are kept]
Nothing is ever left on a path itself, so its figures lie elsewhere: in $SSD_OFFLOAD_CACHE, else in
`offload-strategy` in the user's cache directory ($XDG_CACHE_HOME, else ~/.cache). A variable
$SSD_OFFLOAD_CACHE that is empty keeps nothing. Home directories are shared between machines, disks
are replaced, and a path that several processes use gives each of them a part: figures count only
for the same machine, the same file system, as many processes, and the same way of moving blocks.

[Note: one odd run]
What a run has seen moves a figure half of the way, by ratio, and by no more than a factor of two.
A file that cannot be read, or is not ours, counts as none; one that cannot be written is let be.
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
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from offload_strategy.config.default_directory import expand_path
from offload_strategy.io.regions.block_devices import is_block_device
from offload_strategy.telemetry import Direction, get_logger

logger = get_logger(__name__)

CACHE_VARIABLE = "SSD_OFFLOAD_CACHE"
_FOLDER = "offload-strategy"
_FORMAT = 1
#: A file of ours has a few hundred bytes.
_MOST_BYTES = 64 * 1024
#: Figures of paths that were not used for so long are removed.
_KEPT_SECONDS = 180 * 24 * 3600
#: By how much one run may change a figure at most.
_MOST_CHANGE = 2.0


@dataclass(frozen=True, slots=True)
class PathIdentity:
    """Of what figures are: the same path, used in the same way.

    Args:
        machine: its name.
        path: directory or block device.
        device: what lies there: the file system's number, or the bytes of a block device.
        processes: that use the path together.
        backend: what moves the blocks.
        depth: blocks under way at a time.
    """

    machine: str
    path: str
    device: int
    processes: int
    backend: str
    depth: int

    def __post_init__(self) -> None:
        # What was read from a file is anything that JSON can be.
        if not all(type(text) is str for text in (self.machine, self.path, self.backend)):
            raise ValueError("names must be text")
        if not all(type(count) is int for count in (self.device, self.processes, self.depth)):
            raise ValueError("counts must be whole numbers")

    @classmethod
    def of(cls, path: Path, fd: int, *, processes: int, backend: str, depth: int) -> PathIdentity:
        """Look at a path.

        Args:
            path: directory or block device, as it is used by all processes.
            fd: a file there, or the device.
            processes: see above, as the others.
            backend: likewise.
            depth: likewise.
        """
        device = 0
        with contextlib.suppress(OSError):
            if is_block_device(path):
                device = os.lseek(fd, 0, os.SEEK_END)
            elif hasattr(os, "fstatvfs"):
                device = os.fstatvfs(fd).f_fsid
        return cls(platform.node(), str(path), device, processes, backend, depth)

    @property
    def file_name(self) -> str:
        """Of its figures."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32] + ".json"


@dataclass(frozen=True, slots=True)
class Figure:
    """Bytes per second of one direction of a path.

    Args:
        rate: bytes per second.
        source: whether training has seen it, or a probe when an engine started.
        nbytes: that were moved to find it out, in all runs.
        runs: that it rests on.
        date: when it was last corrected, or measured (ISO 8601, UTC).
    """

    rate: float
    source: Literal["observed", "probe"]
    nbytes: int
    runs: int = 1
    date: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.rate, bool) or not isinstance(self.rate, int | float):
            raise ValueError(f"rate must be a number, got {self.rate!r}")
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"rate must be above 0, got {self.rate}")
        if self.source not in ("observed", "probe"):
            raise ValueError(f"source is {self.source!r}")
        if not all(type(count) is int and count >= 0 for count in (self.nbytes, self.runs)):
            raise ValueError("bytes and runs must be whole numbers")
        if not isinstance(self.date, str):
            raise ValueError(f"date is {self.date!r}")


Figures = Mapping[Direction, Figure]
"""Of the directions of a path that are known."""


def corrected(before: Figure | None, rate: float, nbytes: int) -> Figure:
    """A figure, after a run has seen another one; see [Note: one odd run].

    Args:
        before: with which the run began; None if nothing was known.
        rate: bytes per second that the run has seen.
        nbytes: that it rests on.
    """
    date = datetime.now(UTC).isoformat(timespec="seconds")
    if before is None:
        return Figure(rate, "observed", nbytes, 1, date)
    change = math.sqrt(rate / before.rate)
    change = min(max(change, 1 / _MOST_CHANGE), _MOST_CHANGE)
    # A probe is no run, and its bytes tell little beside those of one.
    observed = before.source == "observed"
    return Figure(
        before.rate * change,
        "observed",
        nbytes + (before.nbytes if observed else 0),
        1 + (before.runs if observed else 0),
        date,
    )


def cache_directory() -> Path | None:
    """Where figures are kept, or None if nowhere; see [Note: where figures of paths are kept]."""
    try:
        given = os.environ.get(CACHE_VARIABLE)
        if given is not None:
            return Path(expand_path(given)) if given.strip() else None
        usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return usual / _FOLDER if usual.is_absolute() else None
    except (ValueError, RuntimeError) as error:  # an unset variable in it; nobody's home
        logger.info("figures of paths are not kept: %s", error)
        return None


def recall(identity: PathIdentity) -> Figures:
    """What earlier runs found out about a path; empty if nothing is known."""
    folder = cache_directory()
    if folder is None:
        return {}
    found = _read(folder / identity.file_name)
    if found is None:
        return {}
    of, figures = found
    return figures if of == identity else {}


def recall_all() -> list[tuple[PathIdentity, Figures]]:
    """Everything that is kept, by path."""
    folder = cache_directory()
    files = sorted(folder.glob("*.json")) if folder is not None and folder.is_dir() else []
    found = [kept for file in files if (kept := _read(file)) is not None]
    return sorted(found, key=lambda kept: (kept[0].machine, kept[0].path, kept[0].processes))


def keep(identity: PathIdentity, figures: Figures) -> bool:
    """Keep figures of a path for the next run; whether that went well."""
    folder = cache_directory()
    if folder is None:
        return False
    text = json.dumps(
        {
            "format": _FORMAT,
            "of": asdict(identity),
            **{str(direction): asdict(figure) for direction, figure in figures.items()},
        },
        indent=1,
    )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Readable for its owner alone, under a name that nobody has; then it takes its place.
        fd, partial = tempfile.mkstemp(".partial", "", folder)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as stream:
                stream.write(text + "\n")
            os.replace(partial, folder / identity.file_name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        _forget_old(folder)
    except OSError as error:
        logger.info("figures of %s are not kept in %s: %s", identity.path, folder, error)
        return False
    return True


def _read(file: Path) -> tuple[PathIdentity, Figures] | None:
    """What a file says; None if there is none, or it is not one of ours."""
    try:
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with os.fdopen(os.open(file, flags), encoding="utf-8") as stream:
            about = os.fstat(stream.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
                raise ValueError("it is no small file")
            if hasattr(os, "geteuid") and about.st_uid != os.geteuid():
                raise ValueError("it belongs to somebody else")
            found = json.loads(stream.read())
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError(f"it is not of format {_FORMAT}")
        return PathIdentity(**found["of"]), dict(_figures(found))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        logger.warning("%s is ignored, and may be removed: %s", file, error)
        return None


def _figures(found: Mapping[str, Any]) -> Iterator[tuple[Direction, Figure]]:
    for direction in Direction:
        if str(direction) in found:
            yield direction, Figure(**found[str(direction)])


def _forget_old(folder: Path) -> None:
    """Remove what was not used for long, and what a killed process has left."""
    oldest = time.time() - _KEPT_SECONDS
    for file in (*folder.glob("*.json"), *folder.glob("*.partial")):
        with contextlib.suppress(OSError):
            if file.lstat().st_mtime < oldest:
                file.unlink()
