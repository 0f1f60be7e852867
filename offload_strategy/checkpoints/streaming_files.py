"""Streaming `torch.save` with atomic replacement of files.

[Note: atomic saves]
A checkpoint is written to a temporary file in the target's directory, which is renamed to the
target when all of its bytes are on disk. The rename is atomic, so readers find the old file or the
new one, also after `kill -9` or a power failure. A killed process leaves its temporary file; the
next save to the same target removes it, because the writer's lock on it ended with the writer.

[Note: errors while an archive is written]
`torch.save` writes through C++ code that keeps every exception alive that passes through it, with
its frames, and closes the archive after an error, with further writes. So the original error is
stored, an empty one passes through, later writes are ignored, and torch's own error is dropped.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, cast

import torch

from offload_strategy.errors import StorageError
from offload_strategy.host_memory.buffers import HostBuffer
from offload_strategy.io.regions.unnamed_files import PageFile
from offload_strategy.telemetry import Progress
from offload_strategy.units import PAGE_BYTES, MiB, format_size, round_up

_BUFFER_BYTES = 8 * MiB
_PARTIAL = ".partial"
#: Longer names are replaced by a digest in the temporary file's name (the limit is 255 bytes).
_LONGEST_NAME = 200

_ADVICE = {
    errno.ENOSPC: "Free some space on the disk of {0}, or choose another place.",
    errno.EDQUOT: "Free some space on the disk of {0}, or choose another place.",
    errno.ENOENT: "Create the directory {0}, or choose another.",
    errno.EIO: "Check the disk and the system's log, or choose another place.",
}


def save(obj: Any, path: str | os.PathLike[str]) -> None:
    """Like `torch.save(obj, path)`, but atomic and without filling the page cache.

    A process that is killed while saving leaves the previous file intact; see [Note: atomic saves].
    The file is a new one each time, so a hard link to the previous file keeps the old contents.
    Symbolic links are followed, and mode and owner of the previous file are kept. The directory
    must exist. Tensors are written one after the other, so file-backed ones, such as those of
    `optimizer.state_dict()`, need not fit in memory.

    Raises a StorageError if the file cannot be written; the previous one is intact.
    """
    target = Path(os.path.realpath(os.fspath(path)))
    size, intact = 0, " The previous file is intact."
    try:
        previous = _previous(target)
        _remove_leftovers(target)
        with _partial_file(target, previous) as (fd, partial):
            stream = _ArchiveWriter(fd)
            try:
                torch.save(obj, cast("Any", stream))
                stream.finish()
            except BaseException:
                if stream.error is not None:
                    raise stream.error from None
                raise
            finally:
                size = stream.size
                stream.close()
            os.fsync(fd)
            os.replace(partial, target)
            intact = ""
        sync_directory(target.parent)
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "Choose another file, or change its permissions.")
        raise StorageError(
            f"could not save to {str(path)!r}: {error.strerror or error} after "
            f"{format_size(size)}. {advice.format(target.parent)}{intact}"
        ) from error


# ---------------------------------------------------------------------- the temporary file
def _previous(target: Path) -> os.stat_result | None:
    """Return the status of the existing file, or None; raises OSError if it is not replaceable."""
    try:
        status = target.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "this is a device or a pipe, which cannot be replaced,")
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is write-protected,")
    return status


@contextmanager
def _partial_file(target: Path, previous: os.stat_result | None) -> Iterator[tuple[int, Path]]:
    """Yield a locked, empty file in the target's directory; it is deleted unless renamed.

    It has mode and owner of the previous file as far as permitted, else those of any new file.
    """
    mode = 0o666 if previous is None else stat.S_IMODE(previous.st_mode)
    while True:
        partial = target.parent / f"{_prefix(target)}{secrets.token_hex(8)}{_PARTIAL}"
        with ExitStack() as end:
            fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode & 0o777)
            end.callback(os.close, fd)
            end.callback(partial.unlink, missing_ok=True)
            # Another process that removes leftovers may have deleted it before the lock.
            if _lock(fd, wait=True) and not os.fstat(fd).st_nlink:
                continue
            if previous is not None:
                with suppress(OSError):
                    os.fchown(fd, previous.st_uid, previous.st_gid)
                with suppress(OSError):
                    os.fchmod(fd, mode)
            yield fd, partial
            return


def _remove_leftovers(target: Path) -> None:
    """Remove temporary files of this target whose writers have ended."""
    for path in target.parent.glob(glob.escape(_prefix(target)) + "[0-9a-f]" * 16 + _PARTIAL):
        # It may belong to another user, or be removed meanwhile.
        with suppress(OSError), FileIO(os.open(path, os.O_RDWR | os.O_NOFOLLOW)) as file:
            if _lock(file.fileno(), wait=False):
                os.unlink(path)


def _prefix(target: Path) -> str:
    name = target.name
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return f".{name}."


def _lock(fd: int, *, wait: bool) -> bool:
    """Lock a file until it is closed; return False if it is locked or locks are unsupported."""
    from fcntl import LOCK_EX, LOCK_NB, flock  # POSIX has it

    try:
        flock(fd, LOCK_EX if wait else LOCK_EX | LOCK_NB)
    except OSError:
        return False
    return True


def sync_directory(directory: Path) -> None:
    """Wait until the entries of a directory are on the disk."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not support it
            raise
    finally:
        os.close(fd)


class _Stopped(Exception):
    """Ends `torch.save`; see [Note: errors while an archive is written]."""


class _ArchiveWriter:
    """The file object that `torch.save` writes to: appends to an empty file with direct I/O."""

    def __init__(self, fd: int) -> None:
        self.size = 0
        #: The first error.
        self.error: BaseException | None = None
        self._fd = fd
        self._file = PageFile(fd)
        self._buffer = HostBuffer(_BUFFER_BYTES)
        self._window = memoryview(self._buffer.acquire(_BUFFER_BYTES)[1]).cast("B")
        self._filled = 0
        self._bar = Progress("saving")

    def write(self, data: Any) -> int:
        """Append bytes; see [Note: errors while an archive is written]."""
        length = memoryview(data).nbytes
        if self.error is None:
            try:
                self._append(memoryview(data).cast("B"))
            except BaseException as error:
                self.error = error
                del data
                raise _Stopped from None
        return length

    def _append(self, rest: memoryview) -> None:
        while rest:
            count = min(len(rest), _BUFFER_BYTES - self._filled)
            self._window[self._filled : self._filled + count] = rest[:count]
            self._filled, self.size, rest = self._filled + count, self.size + count, rest[count:]
            if self._filled == _BUFFER_BYTES:
                self._write_out()

    def flush(self) -> None:
        """Do nothing; `finish` writes the rest."""

    def finish(self) -> None:
        """Write the rest and truncate the file to its size."""
        self._write_out()
        os.ftruncate(self._fd, self.size)
        self._file.drain()

    def close(self) -> None:
        """Release the buffer; torch may keep this object alive."""
        self.error = None
        self._bar.close()
        del self._window
        self._buffer.release()
        del self._buffer

    def _write_out(self) -> None:
        # Direct I/O writes whole pages; `finish` truncates the file.
        pages = round_up(self._filled)
        self._window[self._filled : pages] = bytes(pages - self._filled)
        begin = self.size - self._filled
        assert begin % PAGE_BYTES == 0
        self._file.write(self._window[:pages], begin)
        self._bar.update(self._filled)
        self._filled = 0
