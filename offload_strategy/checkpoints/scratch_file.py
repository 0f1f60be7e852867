"""An unnamed file that backs the tensors of a state dict until they are read.

A state dict must consist of ordinary tensors, but all of them together may not fit in memory. Each
one is therefore written to a scratch file as soon as its values are known, and becomes a tensor
over a memory map of the file; see [Note: tensors over private maps] in private_maps.py.
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

#: Smaller tensors are created in ordinary memory, where a map would cost more than it saves.
SMALL_BYTES = 64 * KiB
#: Size of the buffer through which values are written to the file.
_BUFFER_BYTES = 8 * MiB


def scratch_directories(tiers: Iterable[Path]) -> list[Path]:
    """Return the directories in which a scratch file may be created, best first.

    Args:
        tiers: paths of the ssd tiers: directories and block devices. Devices hold no files.

    Returns:
        The directories and the default directory as a fallback; nothing if there are no tiers.

    Raises:
        ConfigError: there are only devices, and $SSD_OFFLOAD_DIR is invalid.
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
            reserved = [scratch.reserve(shape, dtype) for shape, dtype in wanted]
            for each in reserved:
                each.fill(0, values)
            tensors = [each.tensor() for each in reserved]

    All tensors are reserved first, then filled, then mapped, so the disk space is guaranteed before
    anything is written. Not thread-safe.

    Args:
        directories: candidate directories; the first with enough room is used, with a warning if it
            is the last of several. Without directories tensors are created in ordinary memory.
        what: what is stored, for messages.
    """

    def __init__(self, directories: Sequence[Path], what: str = "optimizer states") -> None:
        self._directories = list(directories)
        self._what = what
        self._places: list[tuple[int, int]] = []  # byte ranges of the tensors
        self._end = 0
        self._allocated = 0
        self._handle: FileIO | None = None
        self._file: PageFile | None = None
        self._buffer: HostBuffer | None = None
        self._maps: PrivateMaps | None = None

    def reserve(
        self, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
    ) -> ScratchTensor:
        """Reserve space for one tensor.

        Args:
            shape: shape of the tensor.
            dtype: dtype of the tensor.
            stride: strides in elements; None for contiguous. Strides with gaps or overlaps become
                contiguous, as in `torch.clone`.
        """
        assert self._maps is None, "reserve everything before the first tensor is mapped"
        shape = torch.Size(shape)
        stride = _contiguous(shape) if stride is None else tuple(stride)
        order = _memory_order(shape, stride)
        if order is None:
            stride, order = _contiguous(shape), list(range(len(shape)))
        nbytes = shape.numel() * dtype.itemsize
        if nbytes < SMALL_BYTES or not self._directories:
            return ScratchTensor(self, torch.empty_strided(shape, stride, dtype=dtype), order)
        offset = self._end
        self._places.append((offset, offset + nbytes))
        self._end = round_up(offset + nbytes)
        # A meta tensor carries shape, dtype and strides.
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return ScratchTensor(self, like, order, offset)

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self._end

    def close(self) -> None:
        """Close the file and the buffer. Idempotent; mapped tensors stay valid."""
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
    def write(self, begin: int, tensor_end: int, values: torch.Tensor, dtype: torch.dtype) -> None:
        """Write contiguous values in whole pages. Called by `ScratchTensor`.

        Args:
            begin: byte offset in the file.
            tensor_end: byte offset of the tensor's end; the rest of that page is unused.
            values: flat tensor on any device.
            dtype: dtype in which they are written.
        """
        assert self._maps is None, "fill everything before the first tensor is mapped"
        end = begin + values.numel() * dtype.itemsize
        written = 0
        try:
            file, buffer = self._opened()
            flat, exporter = buffer.acquire(_BUFFER_BYTES)
            view = memoryview(exporter).cast("B")
            while begin < end:
                base = begin // PAGE_BYTES * PAGE_BYTES
                stop = min(end, base + _BUFFER_BYTES)
                nbytes = round_up(stop - base)
                for edge in _shared_pages(begin - base, stop - base, stop == tensor_end):
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
                f"system's log, or choose another directory for the tier."
            ) from error

    def _opened(self) -> tuple[PageFile, HostBuffer]:
        """Return the file, grown to the reserved size, and the buffer."""
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
        """Create the file in the first directory with room for all reserved tensors."""
        complaints: list[str] = []
        while self._directories:
            directory = self._directories[0]
            complaint: str | None
            try:
                # The destructor closes it at the latest.
                handle = FileIO(create_unnamed(directory), "r+")
                switch_to_direct_io(handle.fileno())
                complaint = self._take_room(handle.fileno())
            except OSError as error:
                complaint = f"cannot hold a file ({error.strerror})"
            else:
                if complaint is None:
                    if complaints:
                        self._log_fallback(complaints)
                    return handle
                handle.close()
            complaints.append(f"{directory} {complaint}")
            del self._directories[0]
        raise self._full(self._end, complaints)

    def _take_room(self, fd: int) -> str | None:
        """Grow the file to the reserved size; return the reason if it cannot."""
        stats = os.fstatvfs(fd)
        free = max(0, stats.f_bavail * stats.f_frsize - RESERVE_BYTES)
        if self._end - self._allocated > free:
            return f"has {format_size(free)} free ({format_size(RESERVE_BYTES)} stay reserved)"
        try:
            grow(fd, self._allocated, self._end)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return "is full"
        self._allocated = self._end
        return None

    def _log_fallback(self, complaints: Sequence[str]) -> None:
        # The user named the other tiers for this purpose, but maybe not the last directory.
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
            f"{format_size(nbytes)} of {self._what} must go to a scratch file, since they may not "
            f"fit in memory together, and no directory has the room: {'; '.join(complaints)}. "
            f"Free some space, or set $SSD_OFFLOAD_DIR to a directory that has it."
        )

    # ------------------------------------------------------------------ mapping
    def mapped(self) -> PrivateMaps:
        """Map all tensors; afterwards nothing can be reserved or filled.

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


class ScratchTensor:
    """One tensor in a scratch file, or in ordinary memory if it is small.

    Args:
        file: the scratch file.
        tensor: the tensor itself if it is in memory, else a meta tensor like it.
        order: the dimensions by decreasing stride.
        offset: byte offset in the file; None if it is in memory.
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
        """Write rows of the tensor.

        Args:
            start_row: first row (index of the first dimension); 0 for a scalar.
            values: the rows, on any device; they are converted to the tensor's dtype. If the tensor
                is not contiguous, all its rows.

        Raises:
            ValueError: the rows do not exist, or only some rows of a non-contiguous tensor.
            TierFullError: no directory has room for all reserved tensors.
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
                f"at once, because its rows are not contiguous"
            )
        row_bytes = like.shape[1:].numel() * dtype.itemsize
        end = self._offset + like.numel() * dtype.itemsize
        # A view if the values have the same memory order.
        flat = values.detach().permute(self._order).reshape(-1)
        self._file.write(self._offset + start_row * row_bytes, end, flat, dtype)

    def tensor(self) -> torch.Tensor:
        """Return the tensor with its own storage; afterwards nothing can be reserved or filled.

        Raises:
            OffloadError: the file cannot be mapped.
        """
        if self._offset is None:
            return self._like
        like = self._like
        flat = self._file.mapped().tensor(self._offset, like.dtype, like.numel())
        return flat.as_strided(like.shape, like.stride())


def _shared_pages(begin: int, end: int, is_last: bool) -> list[int]:
    """Return the offsets of pages at the edges of [begin, end) that hold other data too.

    Args:
        begin: offset in the first page.
        end: offset from the start of the first page.
        is_last: whether the rest of the last page is unused.
    """
    pages = {0} if begin else set()
    if end % PAGE_BYTES and not is_last:
        pages.add(end // PAGE_BYTES * PAGE_BYTES)
    return sorted(pages)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _memory_order(shape: torch.Size, stride: tuple[int, ...]) -> list[int] | None:
    """Return the order of dimensions in which elements are contiguous, or None."""
    order = sorted(range(len(shape)), key=lambda dim: stride[dim], reverse=True)
    expected = 1
    for dim in reversed(order):
        if shape[dim] == 1:
            continue
        if stride[dim] != expected:
            return None
        expected *= shape[dim]
    return order
