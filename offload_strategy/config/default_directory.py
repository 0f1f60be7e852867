"""Directories: where tensors go by default, and whether that place is really a disk."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from offload_strategy.errors import ConfigError

DIRECTORY_VARIABLE = "SSD_OFFLOAD_DIR"

_KEPT_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs"})


def default_directory() -> Path:
    """Return the directory of the default tier.

    That is $SSD_OFFLOAD_DIR, else the temporary directory, else /var/tmp: on many systems /tmp is
    memory, and moving tensors from memory to memory helps nobody.

    Raises:
        ConfigError: If $SSD_OFFLOAD_DIR names a variable that is not set.
    """
    configured = os.environ.get(DIRECTORY_VARIABLE, "").strip()
    if configured:
        try:
            return Path(expand_path(configured))
        except ValueError as error:
            raise ConfigError(f"${DIRECTORY_VARIABLE}: {error}") from None
    directory = Path(tempfile.gettempdir())
    fallback = Path("/var/tmp")
    if is_memory_filesystem(directory) and fallback.is_dir():
        return fallback
    return directory


def is_memory_filesystem(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path lies in a file system that is kept in memory.

    Args:
        path: A file or directory; if it does not exist, the nearest folder above it is looked at.

    Returns:
        False also where it cannot be known, as on systems other than Linux.
    """
    place = Path(os.path.abspath(path))
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        device = place.stat().st_dev
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        # proc_pid_mountinfo(5): id, parent, major:minor, root, mount point, options, tags - type, …
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) > 2 and fields[2] == number:
            return after.split(" ")[0] in _KEPT_IN_MEMORY
    return False


def expand_path(path: str) -> str:
    """Expand '~' and '$VARIABLES' and make a path absolute: other processes may start elsewhere.

    Raises:
        ValueError: If the path is empty or uses a variable that is not set.
    """
    if not path.strip():
        raise ValueError("the path is empty")
    if "\0" in path:
        raise ValueError(f"{path!r} contains a null character")
    expanded = os.path.expandvars(path)
    unset = re.search(r"\$(\w+|\{[^}]*\})", expanded)
    if unset and unset[0] in path:
        raise ValueError(f"{path!r} uses the environment variable {unset[0]}, which is not set")
    return os.path.abspath(os.path.expanduser(expanded))
