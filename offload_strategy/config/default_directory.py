"""The default directory of tiers, and whether a directory is really on a disk."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from offload_strategy.config.file_systems import file_system_of
from offload_strategy.errors import ConfigError

DIRECTORY_VARIABLE = "SSD_OFFLOAD_DIR"


def default_directory() -> Path:
    """Return the directory of the default tier.

    It is $SSD_OFFLOAD_DIR, else the temporary directory, or /var/tmp where the temporary directory
    is kept in memory, as on many systems.

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
    """Return whether a path is in a file system that is kept in memory.

    Args:
        path: A file or directory; if it does not exist, the nearest existing parent counts.

    Returns:
        False also where it is unknown, as on systems other than Linux.
    """
    place = Path(os.path.abspath(path))
    while not place.exists() and place != place.parent:
        place = place.parent
    system = file_system_of(place)
    return system is not None and system.is_memory


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
