"""Private memory maps of a file, and `torch.save` archives that are loaded through them.

[Note: tensors over private maps]
A tensor over a private map is an ordinary tensor. Reading it loads pages that the kernel can drop
at any time; writing to it copies the pages, and the file does not change. The map keeps the file
open and each tensor keeps its map, so both are freed with the last tensor.
Several maps of limited size serve a large file, because kernels refuse a single private map that is
larger than the memory: they might need room for copies of all its pages.
A disk that fails while a page is loaded ends the process (SIGBUS), as with every memory map.

[Note: archives larger than the memory]
`torch.load(mmap=True)` maps the whole file at once. For a larger file torch reads storage by
storage, and each storage is replaced at once by the same bytes in one of several maps. The records
`data/0`, `data/1` and so on are in loading order. The bytes are compared, so an archive with
another layout is loaded correctly too, into memory.
"""

from __future__ import annotations

import mmap
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload_strategy.units import GiB

#: Approximate size of a map that neighbouring tensors share.
_MAP_BYTES = 1 * GiB


class PrivateMaps:
    """Maps of byte ranges of a file; see [Note: tensors over private maps].

    Args:
        fd: file descriptor; may be closed afterwards.
        places: begin and end of each range in bytes, in ascending order.

    Raises:
        OSError: not enough address space or committed memory.
    """

    def __init__(self, fd: int, places: Sequence[tuple[int, int]]) -> None:
        begins = [begin for begin, _ in places[:1]]
        for begin, end in places:
            if end - begins[-1] > _MAP_BYTES and begin > begins[-1]:
                begins.append(begin)
        # A map may begin within the previous range, to align it.
        unit = mmap.ALLOCATIONGRANULARITY
        ends = [*begins[1:], *(end for _, end in places[-1:])]
        self._maps = [
            (begin // unit * unit, _map(fd, begin // unit * unit, end))
            for begin, end in zip(begins, ends, strict=True)
        ]

    def tensor(self, offset: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return a flat tensor of `count` elements at byte `offset`, with its own storage."""
        number = bisect_right(self._maps, offset, key=lambda each: each[0]) - 1
        begin, part = self._maps[number]
        return torch.frombuffer(part, dtype=dtype, count=count, offset=offset - begin)


def can_be_mapped(fd: int, nbytes: int) -> bool:
    """Whether the kernel allows a private map of the first `nbytes` of a file."""
    try:
        _map(fd, 0, nbytes).close()
    except OSError:
        return False
    return True


def _map(fd: int, begin: int, end: int) -> mmap.mmap:
    return mmap.mmap(
        fd,
        end - begin,
        flags=mmap.MAP_PRIVATE,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
        offset=begin,
    )


def load_in_parts(
    path: str | os.PathLike[str],
    locate: Callable[[torch.UntypedStorage, str], Any],
    weights_only: bool | None,
) -> Any:
    """Like `torch.load`, with one storage at a time; see [Note: archives larger than the memory].

    Args:
        path: path of the archive.
        locate: the user's `map_location` function.
        weights_only: as for `torch.load`.
    """
    places = _storage_ranges(path)
    with open(path, "rb") as file:
        maps = PrivateMaps(file.fileno(), sorted(places))
    remaining = iter(places)

    def replace(storage: Any, location: str) -> Any:
        nbytes = storage.nbytes()
        if nbytes:
            begin, end = next(remaining, (0, 0))
            if end - begin == nbytes:
                flat = maps.tensor(begin, torch.uint8, nbytes)
                if torch.equal(flat, torch.empty(0, dtype=torch.uint8).set_(storage)):
                    storage = flat.untyped_storage()
        return locate(storage, location)

    return torch.load(path, map_location=replace, weights_only=weights_only, mmap=False)


def _storage_ranges(path: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """Return the byte range of every non-empty storage, in the order of their numbers."""
    reader: Any = torch._C.PyTorchFileReader(os.fspath(path))
    ranges = {}
    for name in reader.get_all_records():
        if number := re.fullmatch(r"data/(\d+)", name):
            begin, nbytes = reader.get_record_offset(name), reader.get_record_size(name)
            if nbytes:
                ranges[int(number[1])] = (begin, begin + nbytes)
    return [ranges[number] for number in sorted(ranges)]
