"""Private maps of a file: memory that is brought in when it is read.

[Note: tensors over private maps]
A tensor over a private map is an ordinary one. Reading it brings in pages that the kernel can take
back at any time; writing to it copies the pages concerned, and the file stays as it is. The map
keeps the file, and each tensor its map: both go with the last tensor.
Several maps of limited size serve a large file, since kernels refuse a single one that is larger
than all of their memory, as they might have to find room for copies of all its pages.
A disk that fails while a page is brought in ends the process (SIGBUS), as with every memory map.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Sequence

import torch

from offload_strategy.units import GiB

#: What lies behind each other shares a map of about this size.
_MAP_BYTES = 1 * GiB


class PrivateMaps:
    """Maps of the places of a file; see [Note: tensors over private maps].

    Args:
        fd: of the file; may be closed afterwards.
        places: begin and end of each place in bytes, in order.

    Raises:
        OSError: there is not enough address space, or promised memory.
    """

    def __init__(self, fd: int, places: Sequence[tuple[int, int]]) -> None:
        begins = [begin for begin, _ in places[:1]]
        for begin, end in places:
            if end - begins[-1] > _MAP_BYTES and begin > begins[-1]:
                begins.append(begin)
        # A map may begin with the end of the place before: that costs nothing.
        unit = mmap.ALLOCATIONGRANULARITY
        ends = [*begins[1:], *(end for _, end in places[-1:])]
        self._maps = [
            (begin // unit * unit, _map(fd, begin // unit * unit, end))
            for begin, end in zip(begins, ends, strict=True)
        ]

    def tensor(self, offset: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """A flat tensor of `count` elements, with a storage of its own, at `offset` in the file."""
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
