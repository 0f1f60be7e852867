"""Directories of tiers: the default one, and the file system of a path."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from offload_strategy.errors import ConfigError

DIRECTORY_VARIABLE = "SSD_OFFLOAD_DIR"

_NETWORK = frozenset(
    [
        *("nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "glusterfs"),
        *("fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs"),
        *("wekafs", "9p", "afs", "orangefs", "pvfs2", "panfs"),
    ]
)
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs"})


def default_directory() -> Path:
    """Return $SSD_OFFLOAD_DIR, else the temporary directory, or /var/tmp if that is in memory."""
    configured = os.environ.get(DIRECTORY_VARIABLE, "").strip()
    if configured:
        try:
            return Path(expand_path(configured))
        except ValueError as error:
            raise ConfigError(f"${DIRECTORY_VARIABLE}: {error}") from None
    directory, fallback = Path(tempfile.gettempdir()), Path("/var/tmp")
    return fallback if file_system_of(directory).is_memory and fallback.is_dir() else directory


def local_processes() -> int:
    """Return how many processes the launcher has started on this machine; 1 if it does not say."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(said)) if said.isdecimal() else 1


def expand_path(path: str) -> str:
    """Expand '~' and '$VARIABLES' and make a path absolute: other processes may start elsewhere."""
    if not path.strip():
        raise ValueError("the path is empty")
    if "\0" in path:
        raise ValueError(f"{path!r} contains a null character")
    for used in re.finditer(r"\$(?:(\w+)|\{([^}]*)\})", path):
        if (used[1] or used[2]) not in os.environ:
            raise ValueError(f"{path!r} uses the environment variable {used[0]}, which is not set")
    return os.path.abspath(os.path.expanduser(os.path.expandvars(path)))


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A mounted file system, such as ``ext4``; it is unknown of some whether the disk spins."""

    kind: str
    rotational: bool | None = None

    @property
    def is_network(self) -> bool:
        """Whether the data is on another machine."""
        return self.kind in _NETWORK

    @property
    def is_memory(self) -> bool:
        """Whether the data is in memory."""
        return self.kind in _IN_MEMORY


def file_system_of(path: str | os.PathLike[str]) -> FileSystem:
    """Return the file system of a path, existing or not; its kind may be "unknown"."""
    real = Path(os.path.realpath(path))
    mounts = [m for m in psutil.disk_partitions(all=True) if real.is_relative_to(m.mountpoint)]
    if not mounts:
        return FileSystem("unknown")
    # Of two mounts at one place the later hides the earlier.
    mount = max(reversed(mounts), key=lambda each: len(each.mountpoint))
    return FileSystem(mount.fstype, is_rotational(mount.mountpoint))


def is_rotational(
    mount_point: str | os.PathLike[str], devices: Path = Path("/sys/dev/block")
) -> bool | None:
    """Return whether a file system is on a spinning disk; None if that is unknown."""
    try:
        number = os.stat(mount_point).st_dev
        folder = devices / f"{os.major(number)}:{os.minor(number)}"
    except (OSError, AttributeError):  # Windows has no numbers of devices
        return None
    if re.match(r"(vd|xvd|loop)", folder.resolve().name):
        return None  # virtual and loop devices always report a spinning disk
    for place in (folder, folder / ".."):  # a partition's queue is in the disk's directory
        with suppress(OSError):
            return (place / "queue" / "rotational").read_text().strip() == "1"
    return None
