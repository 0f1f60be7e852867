"""Somebody else's file, read where it lies: a shard of a checkpoint, for instance."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from offload_strategy.errors import ConfigError, StorageError
from offload_strategy.io.regions.extents import Extent
from offload_strategy.units import PAGE_BYTES, format_size, round_up


class ExternalFile:
    """A file that is only read, whose ranges stand for extents.

    Args:
        path: a regular file. It must stay as it is while ranges of it are in use.
        tier: name under which its reads are recorded.
        direct: bypass the page cache where the file system can.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], tier: str, *, direct: bool = True) -> None:
        self.path = Path(path)
        self.tier = tier
        self.direct = False
        self.fd = -1
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
        try:
            if direct and hasattr(os, "O_DIRECT"):
                with contextlib.suppress(OSError):
                    self.fd = os.open(self.path, flags | os.O_DIRECT)
                    self.direct = True
            if self.fd < 0:
                self.fd = os.open(self.path, flags)
        except OSError as error:
            raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error
        self._seen = os.fstat(self.fd)
        self.nbytes = self._seen.st_size

    def cover(self, offset: int, nbytes: int) -> tuple[Extent, int]:
        """The page-aligned extent around a range, and where in it the range begins.

        Raises:
            StorageError: the range is not inside the file.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise StorageError(
                f"{self.path}: bytes {offset} to {offset + nbytes} were asked for, but the file "
                f"has {format_size(self.nbytes)}. It may be cut short; fetch it again."
            )
        start = offset // PAGE_BYTES * PAGE_BYTES
        return Extent(start, round_up(offset + nbytes - start, PAGE_BYTES)), offset - start

    def check_unchanged(self) -> None:
        """See to it that nobody has written to the file; it may be renamed, or unlinked.

        Raises:
            StorageError: somebody has.
        """
        now = os.fstat(self.fd)
        if (now.st_size, now.st_mtime_ns) != (self._seen.st_size, self._seen.st_mtime_ns):
            raise StorageError(
                f"{self.path} was written to while weights were still read from it. Load a "
                f"checkpoint without adopt=True if its files may change."
            )

    def free(self, extent: Extent) -> None:
        """Nothing to give back: the file is not ours."""

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
