"""A file without a name in which tensors lie until somebody reads them.

A state dict must be made of ordinary tensors, but all of them at once may not fit into memory. So
each is written to a scratch file as soon as its values are known, and becomes a tensor over a map
of the file: see [Note: tensors over private maps] in `maps`.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path
from typing import Self

import torch

from offload_strategy.checkpoints.private_maps import PrivateMaps
from offload_strategy.config import default_directory
from offload_strategy.errors import ConfigError, OffloadError, StorageError, TierFullError
from offload_strategy.host_memory.buffers import HostBuffer
from offload_strategy.io.regions.block_devices import is_block_device
from offload_strategy.io.regions.directory_check import RESERVE_BYTES
from offload_strategy.io.regions.unnamed_files import (
    PageFile,
    create_unnamed,
    grow,
    switch_to_direct_io,
)
from offload_strategy.telemetry import get_logger
from offload_strategy.units import PAGE_BYTES, KiB, MiB, format_size, round_up

logger = get_logger(__name__)

#: Smaller tensors are made in ordinary memory: a map would cost more than it saves.
SMALL_BYTES = 64 * KiB
#: Values pass through a buffer of this size on their way to the file.
_BUFFER_BYTES = 8 * MiB


def scratch_directories(tiers: Iterable[Path]) -> list[Path]:
    """Where a scratch file may lie, best first, for something that uses ssd tiers.

    Args:
        tiers: paths of the ssd tiers: directories and block devices. A device holds no files; if
            there are only devices, that leaves the default directory.

    Returns:
        The directories, and the default directory for the case that none of them has room; nothing
        if there are no tiers.

    Raises:
        ConfigError: there are only devices, and $SSD_OFFLOAD_DIR is wrong.
    """
    tiers = list(tiers)
    if not tiers:
        return []
    places = [path for path in tiers if not is_block_device(path)]
    try:
        places.append(default_directory())
    except ConfigError:
        if not places:
            raise
    return list(dict.fromkeys(places))


class ScratchFile:
    """Tensors in one unlinked, owner-only file; see [Note: tensors over private maps].

        with ScratchFile(directories) as scratch:
            slots = [scratch.reserve(shape, dtype) for shape, dtype in wanted]
            for slot in slots:
                slot.fill(0, values)
            tensors = [slot.tensor() for slot in slots]

    First everything is reserved, then all is filled, then the tensors are taken: so the room on the
    disk is known to be there before anything is written. Not for several threads at once.

    Args:
        directories: where the file may lie: the first that has room is taken, and if that is the
            last of several, with a warning. None at all: the tensors are made in ordinary memory.
        what: is stored, for messages.
    """

    def __init__(self, directories: Sequence[Path], what: str = "optimizer states") -> None:
        self._directories = list(directories)
        self._what = what
        self._places: list[tuple[int, int]] = []  # of the tensors, in bytes
        self._end = 0
        self._allocated = 0
        self._handle: FileIO | None = None
        self._file: PageFile | None = None
        self._buffer: HostBuffer | None = None
        self._maps: PrivateMaps | None = None

    def reserve(
        self, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
    ) -> Slot:
        """Set a place aside for one tensor.

        Args:
            shape: of the tensor.
            dtype: of the tensor.
            stride: of the tensor, in elements; None for contiguous, as is one with gaps or overlaps
                (`torch.clone` does the same).
        """
        assert self._maps is None, "reserve everything before the first tensor is taken"
        shape = torch.Size(shape)
        stride = _contiguous(shape) if stride is None else tuple(stride)
        order = _memory_order(shape, stride)
        if order is None:
            stride, order = _contiguous(shape), list(range(len(shape)))
        nbytes = shape.numel() * dtype.itemsize
        if nbytes < SMALL_BYTES or not self._directories:
            return Slot(self, torch.empty_strided(shape, stride, dtype=dtype), order)
        offset = self._end
        self._places.append((offset, offset + nbytes))
        self._end = round_up(offset + nbytes)
        # Its shape, dtype and strides, without memory.
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return Slot(self, like, order, offset)

    @property
    def nbytes(self) -> int:
        """Bytes that the file takes when it is made."""
        return self._end

    def close(self) -> None:
        """Give back what filling needed. Idempotent; tensors that were taken stay."""
        handle, self._handle = self._handle, None
        buffer, self._buffer = self._buffer, None
        self._file = None
        if handle is not None:
            handle.close()
        if buffer is not None:
            buffer.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ filling
    def write(self, begin: int, end_of_slot: int, values: torch.Tensor, dtype: torch.dtype) -> None:
        """Write values one behind the other, by whole pages. For slots.

        Args:
            begin: in the file, in bytes.
            end_of_slot: where the tensor ends that they belong to; to the end of that page nothing
                else lies.
            values: flat, on any device.
            dtype: in which they are written.
        """
        assert self._maps is None, "fill everything before the first tensor is taken"
        end = begin + values.numel() * dtype.itemsize
        written = 0
        try:
            file, buffer = self._opened()
            flat, exporter = buffer.lend(_BUFFER_BYTES)
            view = memoryview(exporter).cast("B")
            while begin < end:
                base = begin // PAGE_BYTES * PAGE_BYTES
                stop = min(end, base + _BUFFER_BYTES)
                nbytes = round_up(stop - base)
                for edge in _shared_pages(begin - base, stop - base, stop == end_of_slot):
                    file.read(view[edge : edge + PAGE_BYTES], base + edge)
                count = (stop - begin) // dtype.itemsize
                target = flat[begin - base : stop - base].view(dtype)
                target.copy_(values[written : written + count])
                file.write(view[:nbytes], base)
                begin, written = stop, written + count
        except OSError as error:
            raise StorageError(
                f"could not write {format_size(end - begin)} of {self._what} to the scratch file "
                f"in {self._directories[0]}: {error.strerror or error}. Check the disk and the "
                f"system's log, or name another directory for the tier."
            ) from error

    def _opened(self) -> tuple[PageFile, HostBuffer]:
        """The file, made and grown to all that is reserved, and the buffer."""
        if self._handle is None or self._file is None or self._buffer is None:
            self._handle = self._create()
            self._file = PageFile(self._handle.fileno())
            self._buffer = HostBuffer(_BUFFER_BYTES)
        if self._allocated < self._end:
            missing = self._end - self._allocated
            complaint = self._take_room(self._handle.fileno())
            if complaint is not None:
                raise self._full(missing, [f"{self._directories[0]} {complaint}"])
        return self._file, self._buffer

    def _create(self) -> FileIO:
        """Make the file in the first directory that has room for all that is reserved."""
        complaints: list[str] = []
        while self._directories:
            directory = self._directories[0]
            complaint: str | None
            try:
                # Closed by its destructor, should nobody else do it.
                handle = FileIO(create_unnamed(directory), "r+")
                switch_to_direct_io(handle.fileno())
                complaint = self._take_room(handle.fileno())
            except OSError as error:
                complaint = f"cannot hold a file ({error.strerror})"
            else:
                if complaint is None:
                    if complaints:
                        self._tell(complaints)
                    return handle
                handle.close()
            complaints.append(f"{directory} {complaint}")
            del self._directories[0]
        raise self._full(self._end, complaints)

    def _take_room(self, fd: int) -> str | None:
        """Let the file grow to all that is reserved; what is wrong if it cannot."""
        stats = os.fstatvfs(fd)
        free = max(0, stats.f_bavail * stats.f_frsize - RESERVE_BYTES)
        if self._end - self._allocated > free:
            return f"has {format_size(free)} to give ({format_size(RESERVE_BYTES)} are kept back)"
        try:
            grow(fd, self._allocated, self._end)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return "is full"
        self._allocated = self._end
        return None

    def _tell(self, complaints: Sequence[str]) -> None:
        # Another tier is a place that the user named for such things; the last one may not be.
        level = logging.WARNING if len(self._directories) == 1 else logging.INFO
        logger.log(
            level,
            "%s; %s of %s go to a scratch file in %s instead.",
            "; ".join(complaints),
            format_size(self._end),
            self._what,
            self._directories[0],
        )

    def _full(self, nbytes: int, complaints: Sequence[str]) -> TierFullError:
        return TierFullError(
            f"{format_size(nbytes)} of {self._what} must go to a scratch file, since all at once "
            f"may not fit into memory, and no directory has the room: {'; '.join(complaints)}. "
            f"Free some space, or set $SSD_OFFLOAD_DIR to a directory that has it."
        )

    # ------------------------------------------------------------------ taking
    def taken(self) -> PrivateMaps:
        """The maps of all tensors; from now on nothing can be reserved or filled. For slots.

        Raises:
            OffloadError: the file cannot be mapped.
        """
        if self._maps is None:
            try:
                file, _ = self._opened()
                file.drain()
                assert self._handle is not None
                self._maps = PrivateMaps(self._handle.fileno(), self._places)
            except OSError as error:
                raise OffloadError(
                    f"could not map {format_size(self._end)} of {self._what} from the scratch file "
                    f"in {self._directories[0]}: {error.strerror}. Allow more address space "
                    f"(ulimit -v) or more memory to be promised (sysctl vm.overcommit_memory)."
                ) from error
            finally:
                self.close()
        return self._maps


class Slot:
    """The place of one tensor in a scratch file, or in ordinary memory if it is small.

    Args:
        file: that it belongs to.
        tensor: itself if it lies in memory, else one like it on the meta device.
        order: the dimensions, that of the largest stride first.
        offset: in the file, in bytes; None if it lies in memory.
    """

    def __init__(
        self,
        file: ScratchFile,
        tensor: torch.Tensor,
        order: list[int],
        offset: int | None = None,
    ) -> None:
        self._file = file
        self._like = tensor
        self._order = order
        self._offset = offset

    def fill(self, start_row: int, values: torch.Tensor) -> None:
        """Give rows their values.

        Args:
            start_row: the first row (of the first dimension) that is meant; 0 for a scalar.
            values: of as many rows as are meant, on any device; of another dtype they are
                converted. All rows at once if the tensor is not contiguous.

        Raises:
            ValueError: the rows are not there, or are not all and do not lie together.
            TierFullError: no directory has room for everything that was reserved.
            StorageError: the disk failed.
        """
        like, dtype = self._like, self._like.dtype
        rows = like.shape[0] if like.dim() else 1
        given = values.shape[0] if values.dim() else 1
        if values.shape[1:] != like.shape[1:] or not 0 <= start_row <= rows - given:
            raise ValueError(
                f"values of shape {tuple(values.shape)} from row {start_row} on do not fit into a "
                f"tensor of shape {tuple(like.shape)}"
            )
        if self._offset is None:
            (like[start_row : start_row + given] if like.dim() else like).copy_(values)
            return
        if given < rows and self._order != list(range(like.dim())):
            raise ValueError(
                f"a tensor of shape {tuple(like.shape)} and strides {like.stride()} must be filled "
                f"at once: its rows do not lie one behind the other"
            )
        row_bytes = like.shape[1:].numel() * dtype.itemsize
        end = self._offset + like.numel() * dtype.itemsize
        # A view if the values lie in the same order.
        flat = values.detach().permute(self._order).reshape(-1)
        self._file.write(self._offset + start_row * row_bytes, end, flat, dtype)

    def tensor(self) -> torch.Tensor:
        """The tensor, with a storage of its own. From now on nothing can be reserved or filled.

        Raises:
            OffloadError: the file cannot be mapped.
        """
        if self._offset is None:
            return self._like
        like = self._like
        flat = self._file.taken().tensor(self._offset, like.dtype, like.numel())
        return flat.as_strided(like.shape, like.stride())


def _shared_pages(begin: int, end: int, is_last: bool) -> list[int]:
    """Offsets of the pages at the edges of [begin, end) of which others have a part.

    Args:
        begin: in the first page.
        end: counted from the start of the first page.
        is_last: whether nothing lies between `end` and the end of its page.
    """
    pages = {0} if begin else set()
    if end % PAGE_BYTES and not is_last:
        pages.add(end // PAGE_BYTES * PAGE_BYTES)
    return sorted(pages)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _memory_order(shape: torch.Size, stride: tuple[int, ...]) -> list[int] | None:
    """The order of the dimensions in which elements lie one behind the other, if there is one."""
    order = sorted(range(len(shape)), key=lambda dim: stride[dim], reverse=True)
    expected = 1
    for dim in reversed(order):
        if shape[dim] == 1:
            continue
        if stride[dim] != expected:
            return None
        expected *= shape[dim]
    return order
