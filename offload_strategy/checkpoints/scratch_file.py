"""An unnamed file that backs the tensors of a state dict until they are read.

A state dict must consist of ordinary tensors, but all of them together may not fit in memory. Each
one is therefore written to a scratch file as soon as its values are known, and becomes a tensor
over a memory map of the file; see [Note: tensors over private maps] in copy_on_write_maps.py.
"""

from __future__ import annotations

import logging
import mmap
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Self

import torch

from offload_strategy.checkpoints.copy_on_write_maps import SMALL_BYTES, private_map
from offload_strategy.config import default_directory
from offload_strategy.errors import ConfigError, OffloadError, StorageError, TierFullError
from offload_strategy.host_memory.buffers import HostBuffer
from offload_strategy.io.regions.block_devices import is_block_device
from offload_strategy.io.regions.directory_check import RESERVE_BYTES
from offload_strategy.io.regions.unnamed_files import PageFile, create_unnamed, grow
from offload_strategy.telemetry import get_logger
from offload_strategy.units import PAGE_BYTES, MiB, format_size, round_up

logger = get_logger(__name__)

#: Size of the buffer through which values are written to the file.
_BUFFER_BYTES = 8 * MiB


def scratch_directories(tiers: Sequence[Path]) -> list[Path]:
    """Return the directories in which a scratch file may be created, best first.

    They are those among the paths of the ssd tiers, which may be block devices too, then the
    default directory; without paths there are none.
    """
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

    All tensors are reserved first; then the file is opened, which guarantees the disk space; then
    they are filled, and mapped at the end. Not thread-safe.

    The first directory with enough room is used, with a warning if it is the last of several.
    Without directories tensors are created in ordinary memory.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = list(directories)
        self._end = 0
        self._handle: FileIO | None = None
        self._file: PageFile | None = None
        self._buffer = HostBuffer(_BUFFER_BYTES)
        self._map: mmap.mmap | None = None

    def reserve(
        self, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
    ) -> ScratchTensor:
        """Reserve space for one tensor.

        Strides (None: contiguous) with gaps or overlaps become dense, as in `torch.clone`.
        """
        assert self._file is None, "reserve everything before the file is opened"
        like = torch.empty(shape, dtype=dtype, device="meta")
        if stride is not None:
            like = torch.empty_like(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
        if like.nbytes < SMALL_BYTES or not self._directories:
            return ScratchTensor(self, torch.empty_like(like, device="cpu"))
        offset = self._end
        self._end = round_up(offset + like.nbytes)
        return ScratchTensor(self, like, offset)

    def close(self) -> None:
        """Close the file and the buffer. Idempotent; mapped tensors stay valid."""
        if self._handle is not None:
            self._handle.close()
        self._buffer.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ filling
    def write(self, begin: int, values: torch.Tensor, dtype: torch.dtype) -> None:
        """Write contiguous values from a byte on, through the buffer. Called by `ScratchTensor`."""
        assert self._map is None, "fill everything before the first tensor is mapped"
        file, end = self._file, begin + values.numel() * dtype.itemsize
        assert file is not None, "open the file before the first tensor is filled"
        written = 0
        try:
            flat, exporter = self._buffer.acquire(_BUFFER_BYTES)
            view = memoryview(exporter).cast("B")
            while begin < end:
                base = begin // PAGE_BYTES * PAGE_BYTES
                stop = min(end, base + _BUFFER_BYTES)
                for edge in (begin, stop):
                    if edge % PAGE_BYTES:  # its page holds other data too
                        page = edge // PAGE_BYTES * PAGE_BYTES
                        file.read(view[page - base : page - base + PAGE_BYTES], page)
                count = (stop - begin) // dtype.itemsize
                target = flat[begin - base : stop - base].view(dtype)
                target.copy_(values[written : written + count])
                file.write(view[: round_up(stop - base)], base)
                begin, written = stop, written + count
        except OSError as error:
            raise StorageError(
                f"could not write {format_size(end - begin)} of optimizer states to the scratch "
                f"file in {self._directories[0]}: {error.strerror or error}. Check the disk and "
                f"the system's log, or choose another directory for the tier."
            ) from error

    def open(self) -> None:
        """Create the file in the first directory with room for all reserved tensors.

        Raises TierFullError if there is none.
        """
        if not self._end:
            return
        complaints: list[str] = []
        while self._directories:
            directory = self._directories[0]
            try:
                free = max(0, shutil.disk_usage(directory).free - RESERVE_BYTES)
                if self._end <= free:
                    # The destructor closes it at the latest.
                    handle = FileIO(create_unnamed(directory), "r+")
                    file = PageFile(handle.fileno())
                    grow(handle.fileno(), 0, self._end)
                    self._handle, self._file = handle, file
                    break
                reserve = format_size(RESERVE_BYTES)
                complaint = f"has {format_size(free)} free ({reserve} stay reserved)"
            except OSError as error:
                complaint = f"cannot hold a file ({error.strerror})"
            complaints.append(f"{directory} {complaint}")
            del self._directories[0]
        size, reasons = format_size(self._end), "; ".join(complaints)
        if self._file is None:
            raise TierFullError(
                f"{size} of optimizer states must go to a scratch file, since they may not fit in "
                f"memory together, and no directory has the room: {reasons}. Free some space, or "
                f"set $SSD_OFFLOAD_DIR to a directory that has it."
            )
        if complaints:
            # The user named the other tiers for this purpose, but maybe not the last directory.
            level = logging.WARNING if len(self._directories) == 1 else logging.INFO
            message = "%s; %s of optimizer states go to a scratch file in %s instead."
            logger.log(level, message, reasons, size, self._directories[0])

    # ------------------------------------------------------------------ mapping
    def mapped(self) -> mmap.mmap:
        """Map all tensors; afterwards nothing can be reserved or filled."""
        if self._map is None:
            assert self._file is not None
            assert self._handle is not None
            try:
                self._file.drain()
                self._map = private_map(self._handle.fileno(), self._end)
            except OSError as error:
                raise OffloadError(
                    f"could not map {format_size(self._end)} of optimizer states from the scratch "
                    f"file in {self._directories[0]}: {error.strerror}. Allow more address space "
                    f"(ulimit -v) or more memory to be promised (sysctl vm.overcommit_memory)."
                ) from error
            finally:
                self.close()
        return self._map


@dataclass(frozen=True)
class ScratchTensor:
    """One tensor in a scratch file, or in ordinary memory if it is small.

    `like` is the tensor itself if `offset` (in bytes) is None, else a dense meta tensor like it.
    """

    file: ScratchFile
    like: torch.Tensor
    offset: int | None = None

    def fill(self, start_row: int, values: torch.Tensor) -> None:
        """Write rows of the tensor from a row on, converted to its dtype; 0 for a scalar.

        If the rows are not contiguous, as in a transposed matrix, all must be written at once.
        """
        like, dtype = self.like, self.like.dtype
        rows = like.shape[0] if like.dim() else 1
        given = values.shape[0] if values.dim() else 1
        fits = values.shape[1:] == like.shape[1:] and 0 <= start_row <= rows - given
        assert fits, f"{values.shape} from row {start_row} on do not fit into {like.shape}"
        if self.offset is None:
            (like[start_row : start_row + given] if like.dim() else like).copy_(values)
            return
        order = sorted(range(like.dim()), key=like.stride, reverse=True)
        assert given == rows or like.is_contiguous(), "its rows are not contiguous in memory"
        begin = self.offset + start_row * like.shape[1:].numel() * dtype.itemsize
        # A view if the values have the same memory order.
        self.file.write(begin, values.detach().permute(order).reshape(-1), dtype)

    def tensor(self) -> torch.Tensor:
        """Return the tensor with its own storage; afterwards nothing can be reserved or filled."""
        like = self.like
        if self.offset is None:
            return like
        whole, count = self.file.mapped(), like.numel()
        flat = torch.frombuffer(whole, dtype=like.dtype, count=count, offset=self.offset)
        return flat.as_strided(like.shape, like.stride())
