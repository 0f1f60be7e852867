"""`torch.save` and `torch.load` that stream, and never leave half a checkpoint behind.

[Note: a file is there as a whole or not at all]
What is saved goes to a temporary file beside its target, which takes the target's name when all of
its bytes are on the disk. The system swaps the names in one step, so whoever looks, and whoever
comes after a `kill -9` or a power cut, finds the old file or the new one.
A process that was killed leaves its temporary file. The next save to the same target removes it:
its writer held a lock on it, which ended with the writer.

[Note: errors while an archive is written]
Between `torch.save` and the stream that it writes to lies C++, which never lets go of an exception
that passes through it, of its frames, and of what they refer to. And it closes the archive after an
error as well: more writes come. So what went wrong is kept aside, an exception that refers to
nothing passes through, later writes are taken for done, and what torch makes of that is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from offload_strategy.checkpoints.private_maps import can_be_mapped
from offload_strategy.checkpoints.scratch_file import SMALL_BYTES
from offload_strategy.checkpoints.torch_archive import load_in_parts
from offload_strategy.errors import StorageError
from offload_strategy.host_memory.buffers import HostBuffer
from offload_strategy.io.regions.unnamed_files import PageFile, switch_to_direct_io
from offload_strategy.units import PAGE_BYTES, MiB, format_size, round_up

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # not a POSIX system
    flock = None  # type: ignore[assignment]

_BUFFER_BYTES = 8 * MiB
_PARTIAL = ".partial"
#: Longer names are replaced by a digest in that of the temporary file: 255 bytes is all there is.
_LONGEST_NAME = 200
#: What torch.save writes today begins with it; older formats cannot be mapped.
_ZIP_SIGNATURE = b"PK\x03\x04"


def save(obj: Any, path: str | os.PathLike[str]) -> None:
    """As `torch.save(obj, path)`, but whole or not at all, and without filling the page cache.

    A process that is killed while it saves leaves the previous file as it was; see [Note: a file is
    there as a whole or not at all]. As the file is a new one each time, a hard link to the previous
    one keeps the old contents. A symbolic link is followed, and mode and owner of a previous file
    are kept.

    Args:
        obj: what `torch.save` takes. Tensors are written one after the other, so what is in a
            file, as the states of `optimizer.state_dict()` are, is not brought into memory.
        path: of the file; its directory must exist.

    Raises:
        StorageError: the file cannot be written; the previous one is untouched.
    """
    target = Path(os.path.realpath(os.fspath(path)))
    size, untouched = 0, " What was saved there before is untouched."
    try:
        previous = _previous(target)
        _remove_leftovers(target)
        with _partial_file(target, previous) as (fd, partial):
            with contextlib.closing(_Stream(fd)) as stream:
                try:
                    torch.save(obj, cast("Any", stream))
                    stream.finish()
                except BaseException:
                    if stream.error is not None:
                        raise stream.error from None
                    raise
                finally:
                    size = stream.size
            os.fsync(fd)
            os.replace(partial, target)
            untouched = ""
        _sync_directory(target.parent)
    except OSError as error:
        raise StorageError(
            f"could not save to {str(path)!r}: {error.strerror or error} after "
            f"{format_size(size)}. {_advice(error, target)}{untouched}"
        ) from error


def load(
    path: str | os.PathLike[str], map_location: Any = "cpu", weights_only: bool | None = True
) -> Any:
    """As `torch.load`, but tensors on the CPU lie in the file until they are read.

    The optimizer that `OffloadEngine.attach` returns takes its states from them one by one, so
    `optimizer.load_state_dict(load(path))` never has all of them in memory. While large tensors are
    in use, the file must not be changed in place: `save` here does not, `torch.save` does.

    Args:
        path: of the file. One of the format before PyTorch 1.6 is read into memory.
        map_location: as for `torch.load`.
        weights_only: as for `torch.load`.
    """
    with open(path, "rb") as file:
        mapped = file.read(len(_ZIP_SIGNATURE)) == _ZIP_SIGNATURE
        size = os.fstat(file.fileno()).st_size
        whole = mapped and can_be_mapped(file.fileno(), size)
    if mapped:
        map_location = small_in_memory(map_location)
        if not whole and callable(map_location):
            return load_in_parts(path, map_location, weights_only)
        mapped = whole
    return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=mapped)


def small_in_memory(map_location: Any) -> Any:
    """A `map_location` with which a counter of a few bytes does not keep a whole file mapped.

    Args:
        map_location: of the user's. One that is None or names devices is left as it is.
    """
    if callable(map_location):
        locate = map_location
    elif str(map_location) == "cpu":
        locate = _stay
    else:
        return map_location

    def small(storage: torch.UntypedStorage, location: str) -> Any:
        found = locate(storage, location)
        # None is for torch to decide.
        return found.clone() if found is storage and storage.nbytes() < SMALL_BYTES else found

    return small


def _stay(storage: torch.UntypedStorage, _: str) -> torch.UntypedStorage:
    return storage


# ---------------------------------------------------------------------- the temporary file
def _previous(target: Path) -> os.stat_result | None:
    """What lies there now, if anything does.

    Raises:
        OSError: it may not be replaced.
    """
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


@contextlib.contextmanager
def _partial_file(target: Path, previous: os.stat_result | None) -> Iterator[tuple[int, Path]]:
    """A locked, empty file beside the target, which is gone afterwards unless it was renamed.

    As readable as the target is, or will be: the user's mask says for whom.
    """
    mode = 0o666 if previous is None else stat.S_IMODE(previous.st_mode) & 0o777
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    while True:
        partial = target.parent / f"{_prefix(target)}{secrets.token_hex(8)}{_PARTIAL}"
        fd = os.open(partial, flags, mode)
        # Who looked for leftovers just now may have taken it for one, and removed it.
        if not _lock(fd, wait=True) or os.fstat(fd).st_nlink:
            break
        os.close(fd)
    try:
        if previous is not None:
            _resemble(fd, previous)
        switch_to_direct_io(fd)
        yield fd, partial
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        os.close(fd)


def _resemble(fd: int, previous: os.stat_result) -> None:
    """Give a file another's owner and mode, as far as this user may."""
    now = os.fstat(fd)
    if (now.st_uid, now.st_gid) != (previous.st_uid, previous.st_gid):
        with contextlib.suppress(OSError):
            os.fchown(fd, previous.st_uid, previous.st_gid)
    with contextlib.suppress(OSError):
        os.fchmod(fd, stat.S_IMODE(previous.st_mode))


def _remove_leftovers(target: Path) -> None:
    """Remove temporary files of this target whose writers are gone."""
    name = re.compile(re.escape(_prefix(target)) + "[0-9a-f]{16}" + re.escape(_PARTIAL))
    with os.scandir(target.parent) as entries:
        found = [entry.path for entry in entries if name.fullmatch(entry.name)]
    for path in found:
        with contextlib.suppress(OSError):  # it is another user's, or gone by now
            fd = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            try:
                if _lock(fd, wait=False):
                    os.unlink(path)
            finally:
                os.close(fd)


def _prefix(target: Path) -> str:
    name = target.name
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return f".{name}."


def _lock(fd: int, *, wait: bool) -> bool:
    """Lock a file until it is closed; False if another has it, or locks are not to be had."""
    if flock is None:
        return False
    try:
        flock(fd, LOCK_EX if wait else LOCK_EX | LOCK_NB)
    except OSError:
        return False
    return True


def _sync_directory(directory: Path) -> None:
    """Wait until a new name is on the disk."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot, and need not
            raise
    finally:
        os.close(fd)


def _advice(error: OSError, target: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"Free some space on the disk of {target.parent}, or name another place."
    if error.errno == errno.ENOENT:
        return f"Create the directory {target.parent}, or name another."
    if error.errno == errno.EIO:
        return "Check the disk and the system's log, or name another place."
    return "Name another file, or change its permissions."


class _Stopped(Exception):
    """Ends `torch.save`; see [Note: errors while an archive is written]."""


class _Stream:
    """What `torch.save` writes to: a file that grows at its end, past the page cache.

    Args:
        fd: of an empty file; stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self.size = 0
        #: What went wrong first.
        self.error: BaseException | None = None
        self._fd = fd
        self._file = PageFile(fd)
        self._buffer = HostBuffer(_BUFFER_BYTES)
        self._exporter = self._buffer.lend(_BUFFER_BYTES)[1]
        self._window = memoryview(self._exporter).cast("B")
        self._filled = 0

    def write(self, data: Any) -> int:
        """Take bytes; see [Note: errors while an archive is written].

        Raises:
            _Stopped: the disk is full or fails, or Ctrl-C was pressed: `error` is what happened.
        """
        length = memoryview(data).nbytes
        if self.error is None:
            try:
                self._take(memoryview(data).cast("B"))
            except BaseException as error:
                self.error = error
                del data
                raise _Stopped from None
        return length

    def _take(self, rest: memoryview) -> None:
        while rest:
            count = min(len(rest), _BUFFER_BYTES - self._filled)
            self._window[self._filled : self._filled + count] = rest[:count]
            self._filled, self.size, rest = self._filled + count, self.size + count, rest[count:]
            if self._filled == _BUFFER_BYTES:
                self._write_out()

    def flush(self) -> None:
        """Nothing yet: `finish` writes what is left."""

    def finish(self) -> None:
        """Write what is left, and end the file there.

        Raises:
            OSError: the disk is full, or fails.
        """
        self._write_out()
        os.ftruncate(self._fd, self.size)
        self._file.drain()

    def close(self) -> None:
        """Give the buffer back."""
        self.error = None
        del self._window, self._exporter
        self._buffer.release()
        del self._buffer

    def _write_out(self) -> None:
        # Whole pages, for direct I/O; the file is cut to its size in the end.
        pages = round_up(self._filled)
        self._window[self._filled : pages] = bytes(pages - self._filled)
        begin = self.size - self._filled
        assert begin % PAGE_BYTES == 0
        self._file.write(self._window[:pages], begin)
        self._filled = 0
