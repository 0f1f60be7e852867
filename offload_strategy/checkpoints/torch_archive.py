"""Loading a `torch.save` archive that is too large for a single private map.

`torch.load(mmap=True)` maps the whole file at once, which kernels refuse for files larger than the
memory. Here torch reads storage by storage, and each storage is replaced at once by the same bytes
in one of several maps. The archive's directory gives their positions: the records `data/0`,
`data/1` and so on are in loading order. The bytes are compared, so an archive with another layout
is loaded correctly too, into memory.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable
from typing import Any

import torch

from offload_strategy.checkpoints.private_maps import PrivateMaps

_LOCAL_HEADER_BYTES = 30


def load_in_parts(
    path: str | os.PathLike[str],
    locate: Callable[[torch.UntypedStorage, str], Any],
    weights_only: bool | None,
) -> Any:
    """Like `torch.load`, with one storage at a time in memory.

    Args:
        path: path of the archive.
        locate: the user's `map_location` function.
        weights_only: as for `torch.load`.
    """
    places = _places(path)
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


def _places(path: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """Return the byte range of every non-empty storage, in the order of their numbers."""
    found: dict[int, tuple[int, int]] = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for record in archive.infolist():
            number = re.fullmatch(r"[^/]+/data/(\d+)", record.filename)
            if number is None or not record.file_size:
                continue
            file.seek(record.header_offset)
            header = file.read(_LOCAL_HEADER_BYTES)
            names = int.from_bytes(header[26:28], "little") + int.from_bytes(
                header[28:30], "little"
            )
            begin = record.header_offset + _LOCAL_HEADER_BYTES + names
            found[int(number[1])] = (begin, begin + record.file_size)
    return [found[number] for number in sorted(found)]
