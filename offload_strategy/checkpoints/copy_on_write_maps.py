"""Tensors over private memory maps of files, and `torch.save` archives loaded through them.

[Note: tensors over private maps]
Reading such a tensor loads pages that the kernel can drop at any time; writing to it copies them,
and the file does not change. The map keeps the file open and each tensor keeps the map. A disk that
fails while a page is loaded ends the process (SIGBUS), as with every memory map.

[Note: archives larger than the memory]
`torch.load(mmap=True)` makes the kernel reserve memory for copies of all pages, which it refuses
for a file larger than the memory. torch then reads such a file storage by storage, and each storage
is replaced at once by the same bytes in a map without reservation. The records `data/0`, `data/1`
and so on are in loading order. The bytes are compared, so an archive with another layout is loaded
correctly too, into memory.
"""

from __future__ import annotations

import mmap
import os
import re
import zipfile
from collections.abc import Callable
from typing import Any

import torch

from offload_strategy.units import KiB

#: Smaller tensors are created in ordinary memory, where a map would cost more than it saves.
SMALL_BYTES = 64 * KiB
#: The kernel reserves no memory for copies of the pages.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def private_map(fd: int, nbytes: int, *, flags: int = _MAP_NORESERVE) -> mmap.mmap:
    """Map the first `nbytes` of a file; see [Note: tensors over private maps]."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE | flags, prot=protection)


def can_be_reserved(fd: int, nbytes: int) -> bool:
    """Whether the kernel reserves memory for copies of all pages of a map."""
    try:
        private_map(fd, nbytes, flags=0).close()
    except OSError:
        return False
    return True


def load(
    path: str | os.PathLike[str], map_location: Any = "cpu", weights_only: bool | None = True
) -> Any:
    """Like `torch.load`, but CPU tensors stay in the file until they are read.

    The optimizer that `OffloadEngine.attach` returns copies its states one by one, so
    `optimizer.load_state_dict(load(path))` never has all of them in memory. While large tensors are
    in use, the file must not be modified in place; `save` replaces it, `torch.save` modifies it.
    The format before PyTorch 1.6 is read into memory. Arguments are as for `torch.load`.
    """
    with open(path, "rb") as file:
        is_archive = zipfile.is_zipfile(file)  # older formats cannot be mapped
        size = os.fstat(file.fileno()).st_size
        whole = is_archive and can_be_reserved(file.fileno(), size)
        if is_archive:
            map_location = small_in_memory(map_location)
            if not whole and callable(map_location):
                whole_map = private_map(file.fileno(), size)
                map_location = _in_map(map_location, whole_map, _storage_ranges(path))
    return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=whole)


def small_in_memory(map_location: Any) -> Any:
    """Return a `map_location` that copies small tensors, so that they do not keep a file mapped.

    None and mappings to devices are returned unchanged.
    """
    if not callable(map_location) and str(map_location) != "cpu":
        return map_location

    def small(storage: torch.UntypedStorage, location: str) -> Any:
        found = map_location(storage, location) if callable(map_location) else storage
        # torch handles a result of None.
        return found.clone() if found is storage and storage.nbytes() < SMALL_BYTES else found

    return small


def _in_map(
    locate: Callable[[Any, str], Any], whole: mmap.mmap, places: list[tuple[int, int]]
) -> Callable[[Any, str], Any]:
    """Return a `map_location` that replaces each storage by the same bytes in a map."""
    remaining = iter(places)

    def replace(storage: Any, location: str) -> Any:
        if storage.nbytes():
            begin, nbytes = next(remaining, (0, 0))
            if nbytes == storage.nbytes():
                flat = torch.frombuffer(whole, dtype=torch.uint8, count=nbytes, offset=begin)
                if torch.equal(flat, torch.empty(0, dtype=torch.uint8).set_(storage)):
                    storage = flat.untyped_storage()
        return locate(storage, location)

    return replace


def _storage_ranges(path: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """Return offset and size of every non-empty storage, in the order of their numbers."""
    reader: Any = torch._C.PyTorchFileReader(os.fspath(path))
    with zipfile.ZipFile(path) as archive:
        ranges = {
            int(number[1]): (reader.get_record_offset(number[0]), record.file_size)
            for record in archive.infolist()
            if (number := re.search(r"(?<=/)data/(\d+)$", record.filename))
        }
    return [ranges[number] for number in sorted(ranges) if ranges[number][1]]
